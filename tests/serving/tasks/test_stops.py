"""Stop strings on growing text."""

import random

import pytest

from mlflow_llm.serving.tasks.stops import StopMatcher


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
    """What cannot become a stop string goes out at once, and a false beginning goes out when it fails."""
    matcher = StopMatcher(("END",))
    assert matcher.push("go E") == ("go ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)


def test_overlapping_beginning():
    """A beginning inside a failed beginning is not lost: "aab" is found in "aaab"."""
    assert _run(["aab"], list("xaaab!")) == ("xa", "aab")


def test_first_complete_match_wins():
    """Of two stop strings in one piece the one that is complete first ends the text."""
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
