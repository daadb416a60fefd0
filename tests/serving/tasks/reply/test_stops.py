"""Stop strings on growing text."""

import random

import pytest

from mlflow_llm.serving.tasks.reply.stops import SequenceStops, StopMatcher


def _run(stops, pieces):
    matcher, out = StopMatcher(tuple(stops)), []
    for piece in pieces:
        free, match = matcher.push(piece)
        out.append(free)
        if match is not None:
            return "".join(out), match.stop
    return "".join(out) + matcher.flush(), None


def test_match_across_pieces():
    """A stop string split over three pieces is found and trimmed."""
    assert _run(["STOP"], ["ab S", "TO", "P cd"]) == ("ab ", "STOP")


def test_holds_only_a_possible_beginning():
    """Text that cannot begin a stop string is sent at once, and a false beginning once it fails to match."""
    matcher = StopMatcher(("END",))
    assert matcher.push("go E") == ("go ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)


def test_overlapping_beginning():
    """A beginning inside a failed beginning is not lost: "aab" is found in "aaab"."""
    assert _run(["aab"], list("xaaab!")) == ("xa", "aab")


def test_first_complete_match_wins():
    """The stop string that is complete first ends the text."""
    assert _run(["dog", "o"], ["hot dog"]) == ("h", "o")


def test_unfinished_beginning_is_delivered_at_the_end():
    """Text held back as a possible beginning belongs to the reply when the text ends."""
    assert _run(["STOP"], ["all STO"]) == ("all STO", None)


@pytest.mark.parametrize("seed", range(200))
def test_random_against_whole_text(seed):
    """However the text is cut into pieces, the result is that of growing it character by character."""
    draw = random.Random(seed)
    text = "".join(draw.choice("ab") for _ in range(30))
    stops = ["".join(draw.choice("ab") for _ in range(draw.randrange(2, 6))) for _ in range(draw.randrange(1, 4))]
    pieces, rest = [], text
    while rest:
        cut = draw.randrange(1, 5)
        pieces.append(rest[:cut])
        rest = rest[cut:]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text if not ends else text[: min(ends)[1]]
    assert _run(stops, pieces)[0] == expected


def _through(sequences, tokens):
    """Feed the tokens, of one or two characters each; return the texts let through and the end of the text."""
    stops, texts, place = SequenceStops(sequences), [], 0
    for token in tokens:
        text = chr(token) * (1 + token % 2)
        stops.feed(token, place)
        place += len(text)
        if stops.start is not None:
            return [*texts, stops.flush(text, stops.start)], stops.rest()
        texts.append(stops.push(text))
    return [*texts, stops.flush()], None


def test_text_of_a_possible_stop_sequence_is_held():
    """The beginning of a stop sequence is held back, and sent once it cannot match."""
    a, b, c = map(ord, "bdf")
    assert _through(((a, b, c),), (a, b, a, b, c, a)) == (["", "", "bd", "", ""], "bdf")
    assert _through(((a, b, c),), (c, a, b)) == (["f", "", "", "bd"], None)


def test_stop_sequences_against_a_plain_search():
    """For random texts the result is that of a plain search: the first complete stop sequence, the longest of several,
    ends the text.
    """
    rng = random.Random(8)
    for _ in range(500):
        sequences = tuple(tuple(rng.choices((97, 98), k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3)))
        tokens = rng.choices((97, 98), k=12)
        ends = [
            (end, -len(ids))
            for ids in sequences
            for end in range(len(ids), 13)
            if tuple(tokens[end - len(ids) : end]) == ids
        ]
        kept = tokens[: sum(min(ends))] if ends else tokens
        texts, rest = _through(sequences, tokens)
        assert "".join(texts) == "".join(chr(t) * (1 + t % 2) for t in kept)
        assert (rest is not None) == bool(ends)
