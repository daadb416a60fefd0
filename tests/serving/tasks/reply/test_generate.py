"""The conversion of an engine's events to pieces: text, stops, ends and usage."""

import pytest
from msgspec.structs import replace
from scripted_engine import ScriptedEngine, spoken

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.errors import DeadlineExceeded, EngineDied, InternalError
from mlflow_llm.serving.interface.events import (
    Failed,
    Finished,
    Logits,
    PromptScored,
    StepTiming,
    Timed,
    TokenLogprob,
    Tokens,
)
from mlflow_llm.serving.interface.reply import Delta, Done, Ended, Step
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply import generate


@pytest.fixture
def ask(endpoint):
    def build(**body):
        body = body if "messages" in body else {"prompt": "hello", **body}
        return prepare(DIALECTS["mlflow"].read(body), endpoint)

    return build


def _reply(engine, request, text):
    return generate.gather(generate.run(engine, request, text))


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_stop_string_across_tokens(text, ask, chunk):
    """The text ends before the stop string and usage counts to the token that completed it, however tokens arrive."""
    ids = text.encode("hello world 😀 ST", False) + text.encode("OP", False)
    engine = ScriptedEngine(spoken(0, ids + text.encode(" and more", False), chunk=chunk))
    reply = _reply(engine, ask(stop=["STOP", "never"]), text)
    assert reply.choices[0].text == "hello world 😀 "
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].stop_reason == "STOP"
    assert reply.usage.completion_tokens == len(ids)
    assert engine.stream.closed


def test_stop_string_kept_on_request(text, ask):
    """include_stop_str_in_output leaves the stop string, and nothing behind it."""
    ids = text.encode("one STOP two", False)
    reply = _reply(ScriptedEngine(spoken(0, ids)), ask(stop="STOP", include_stop_str_in_output=True), text)
    assert reply.choices[0].text == "one STOP"


def test_stopped_choice_is_finished_in_the_engine(text, ask):
    """With n choices a stop string ends its own sequence in the engine; the others run on."""
    first, second = text.encode("a STOP b c d", False), text.encode("quick brown fox", False)
    engine = ScriptedEngine([*spoken(0, first, cached=2), *spoken(1, second, "length", cached=5)])
    reply = _reply(engine, ask(n=2, stop="STOP"), text)
    assert engine.stream.finished == [0]
    assert [c.text for c in reply.choices] == ["a ", "quick brown fox"]
    assert [c.finish_reason for c in reply.choices] == ["stop", "length"]
    assert reply.usage.completion_tokens == len(text.encode("a STOP", False)) + len(second)


def test_all_choices_in_one_submit(text, ask):
    """All prompts times n are one request, prompts outer, with a seed each."""
    engine = ScriptedEngine([e for i in range(6) for e in spoken(i, (9,))])
    reply = _reply(engine, ask(prompt=["hello", "the dog", "fox"], n=2, seed=5), text)
    assert len(engine.requests) == 1
    assert len({s.seed for s in engine.requests[0].sequences}) == 6
    assert [c.index for c in reply.choices] == list(range(6))


def test_usage_counts_each_prompt_once(text, ask):
    """Prompt tokens are billed once a prompt, completion tokens for each choice with its end-of-text, cached of the
    first choice of each prompt."""
    eos = text.eos_token_ids[0]
    events = [e for i in range(4) for e in spoken(i, (*text.encode("fox", False), eos), cached=(3, 9, 4, 9)[i])]
    request = ask(prompt=["hello", "the dog"], n=2)
    reply = _reply(ScriptedEngine(events), request, text)
    assert reply.usage.prompt_tokens == len(text.encode("hello")) + len(text.encode("the dog"))
    assert reply.usage.completion_tokens == 4 * (len(text.encode("fox", False)) + 1)
    assert reply.usage.cached_tokens == 7
    assert {c.text for c in reply.choices} == {"fox"}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_text_of_a_stop_sequence(any_text, ask, chunk, kept):
    """Tokens that end the text are counted and not shown, unless asked for, however they arrive; a stop string before
    them goes first. Log probabilities are those of the text that is sent."""
    text, run = any_text, any_text.encode("over the lazy dog", False)[1:4]
    ids = (*any_text.encode("hello 😀", False), *run[:2], *any_text.encode("fox", False), *run)
    request = ask(logprobs=0, include_stop_str_in_output=kept)
    request = replace(request, sampling=replace(request.sampling, stop_sequences=(run, (1, 1, 1)), logprobs=0))
    events = spoken(0, ids, chunk=chunk)
    events = [
        replace(event, logprobs=tuple(TokenLogprob(t, -1.0) for t in event.token_ids))
        if isinstance(event, Tokens)
        else event
        for event in events
    ]
    reply = _reply(ScriptedEngine(events), request, text)
    prompt = request.sequences[0].prompt_token_ids
    choice, whole, before = reply.choices[0], text.decode((*prompt, *ids)), len(text.decode(prompt))
    shown = ids if kept else ids[: -len(run)]
    assert choice.text == text.decode((*prompt, *shown))[before:]
    assert (choice.finish_reason, choice.stop_reason) == (
        "stop",
        whole[len(text.decode((*prompt, *ids[: -len(run)]))) :],
    )
    whole = whole[before:]
    assert [entry.token_id for entry in choice.logprobs] == list(shown)
    assert reply.usage.completion_tokens == len(ids)
    early = _reply(ScriptedEngine(events), replace(request, stop=(whole[3:6],)), text).choices[0]
    assert (early.text, early.stop_reason) == (whole[: 6 if kept else 3], whole[3:6])


def test_stop_token_has_no_text(text, ask):
    """A caller's stop token ends the text, is counted, is not shown, and is named as the reason."""
    stop = text.encode("###", False)[0]
    reply = _reply(ScriptedEngine(spoken(0, (*text.encode("dog", False), stop))), ask(stop_token_ids=[stop]), text)
    assert reply.choices[0].text == "dog"
    assert reply.choices[0].stop_reason == stop
    assert reply.usage.completion_tokens == len(text.encode("dog", False)) + 1


def test_end_of_text_shown_only_when_it_does_not_end(text, ask):
    """ignore_eos with skip_special_tokens false shows the end-of-text token as text."""
    ids = (*text.encode("a", False), text.eos_token_ids[0], *text.encode("b", False))
    reply = _reply(ScriptedEngine(spoken(0, ids, "length")), ask(ignore_eos=True, skip_special_tokens=False), text)
    assert reply.choices[0].text == "a</s>b"


def test_min_tokens_before_a_stop_string(text, ask):
    """A stop string inside the first min_tokens tokens does not end the text."""
    ids = text.encode("STOP it STOP now", False)
    reply = _reply(
        ScriptedEngine(spoken(0, ids)), ask(stop="STOP", min_tokens=len(text.encode("STOP", False)) + 1), text
    )
    assert reply.choices[0].text == "STOP it "


def test_echo_and_suffix(text, ask):
    """echo puts the caller's prompt first, suffix is appended to the end; neither is counted as completion."""
    ids = text.encode(" world", False)
    reply = _reply(ScriptedEngine(spoken(0, ids, "length")), ask(echo=True, suffix=" — end"), text)
    assert reply.choices[0].text == "hello world — end"
    assert reply.usage.completion_tokens == len(ids)


def test_logprobs_follow_the_text(text, ask):
    """Log probabilities are given for the tokens whose text is shown, not for a trimmed stop string."""
    ids = text.encode("dog ", False) + text.encode("STOP", False)
    events = [Tokens(0, (i,), (TokenLogprob(i, -0.5, ((i, -0.5), (9, -2.0))),)) for i in ids]
    reply = _reply(ScriptedEngine([*events, Finished(0, "stop")]), ask(logprobs=2, stop="STOP"), text)
    shown = "".join(entry.token for entry in reply.choices[0].logprobs)
    assert shown == reply.choices[0].text == "dog "
    assert all(len(entry.top) == 2 for entry in reply.choices[0].logprobs)


def test_logprobs_of_half_characters(text, ask):
    """Each token of a character has its own bytes; together they are the character."""
    ids = text.encode("🧪", False)
    events = [Tokens(0, (i,), (TokenLogprob(i, -1.0),)) for i in ids]
    reply = _reply(ScriptedEngine([*events, Finished(0, "length")]), ask(logprobs=0), text)
    assert b"".join(bytes(entry.bytes) for entry in reply.choices[0].logprobs).decode() == "🧪"


def test_echo_with_logprobs_scores_the_prompt(text, ask):
    """The echoed prompt comes with its tokens' log probabilities; the first has none."""
    request = ask(echo=True, logprobs=1)
    prompt = request.sequences[0].prompt_token_ids
    scored = PromptScored(0, tuple(TokenLogprob(i, -0.1) for i in prompt[1:]))
    token = text.encode(" dog", False)[0]
    events = [scored, Tokens(0, (token,), (TokenLogprob(token, -0.2),)), Finished(0, "length")]
    choice = _reply(ScriptedEngine(events), request, text).choices[0]
    assert choice.logprobs[0].logprob is None
    assert [entry.token_id for entry in choice.logprobs] == [*prompt, token]
    assert request.sampling.prompt_logprobs == 1
    assert choice.logprobs[0].start == choice.logprobs[1].start == 0  # the BOS is not in the text
    assert choice.logprobs[-1].start == len("hello")


@pytest.mark.parametrize("chunk", [1, 3])
def test_where_tokens_start(text, ask, chunk):
    """A token's start is its place in the reply's text, behind an echo, parts of characters and what is skipped."""
    single = {text.token_bytes(i): i for i in range(text.vocab_size)}
    ids = [single[data] for data in (b"a", b"\xc3", b"\xa9", b"<s>", b"b", b"\xe6", b"c")]
    logprobs = [TokenLogprob(i, -1.0) for i in ids]
    parts = [slice(i, i + chunk) for i in range(0, len(ids), chunk)]
    events = [Tokens(0, tuple(ids[part]), tuple(logprobs[part])) for part in parts]
    prompt = [single[b"x"], single[b"\xe6"]]
    request = ask(prompt=prompt, echo=True, logprobs=0)
    scored = PromptScored(0, (TokenLogprob(prompt[1], -0.1),))
    choice = _reply(ScriptedEngine([scored, *events, Finished(0, "length")]), request, text).choices[0]
    assert choice.text == "x\ufffdaéb\ufffdc"
    assert [entry.start for entry in choice.logprobs] == [0, 1, 2, 3, 3, 4, 4, 5, 6]


def test_a_stop_string_behind_half_a_character(text, ask):
    """Tokens removed with a stop string have no log probabilities, even after half a character."""
    single = {text.token_bytes(i): i for i in range(text.vocab_size)}
    ids = [single[data] for data in (b"a", b"\xe6", b"b")]
    events = [Tokens(0, (i,), (TokenLogprob(i, -1.0),)) for i in ids]
    choice = _reply(ScriptedEngine([*events, Finished(0, "stop")]), ask(logprobs=0, stop="b"), text).choices[0]
    assert choice.text == "a\ufffd"
    assert [entry.token_id for entry in choice.logprobs] == ids[:2]


def test_deadline_is_an_error_or_a_length(text, ask):
    """A passed time limit raises, or with error_behavior truncate returns what exists as "length"."""
    events = spoken(0, text.encode("the quick", False), "deadline")
    with pytest.raises(DeadlineExceeded):
        _reply(ScriptedEngine(events), ask(timeout=1), text)
    choice = _reply(ScriptedEngine(events), ask(timeout=1, error_behavior="truncate"), text).choices[0]
    assert (choice.text, choice.finish_reason) == ("the quick", "length")


def test_failed_is_raised_again_as_its_kind(text, ask):
    """A Failed event becomes the error it names, with its retry time, and the stream is closed."""
    engine = ScriptedEngine([Tokens(0, (9,)), Failed("engine_died", "gone", None, 2.0)])
    with pytest.raises(EngineDied) as caught:
        _reply(engine, ask(), text)
    assert caught.value.retry_after == 2.0
    assert engine.stream.closed


def test_stream_that_ends_early_is_an_internal_error(text, ask):
    """An engine that stops talking before a sequence ended is never taken for a complete answer."""
    with pytest.raises(InternalError):
        _reply(ScriptedEngine([Tokens(0, (9,))]), ask(), text)


def test_closing_aborts(text, ask):
    """Closing the pieces closes the engine's stream, also when no piece was ever asked for."""
    started, unstarted = ScriptedEngine(spoken(0, (9, 9))), ScriptedEngine(spoken(0, (9, 9)))
    pieces = generate.run(started, ask(), text)
    next(pieces)
    pieces.close()
    generate.run(unstarted, ask(), text).close()
    assert started.stream.closed
    assert unstarted.stream.closed


def test_tokens_are_counted_before_they_are_reported(text, ask):
    """on_tokens has seen every token that a piece carries, and in the end as many as usage says."""
    seen = []
    ids = text.encode("the quick brown STOP", False)
    run = generate.run(ScriptedEngine(spoken(0, ids)), ask(stop="STOP"), text, lambda i, count: seen.append(count))
    reported = 0
    for piece in run:
        reported += piece.num_tokens if isinstance(piece, Delta) else 0
        assert sum(seen) == reported
        if isinstance(piece, Done):
            assert sum(seen) == piece.usage.completion_tokens


def test_end_comes_once_and_done_last(text, ask):
    """Each choice ends exactly once, and Done is the last piece."""
    pieces = list(generate.run(ScriptedEngine([*spoken(0, (9,)), *spoken(1, (9,))]), ask(n=2), text))
    assert sum(isinstance(p, Ended) for p in pieces) == 2
    assert isinstance(pieces[-1], Done)


def test_steps_come_before_their_text(text, ask):
    """Measured steps are pieces before the deltas of their tokens, and stand in a whole reply's choice."""
    ids = text.encode("hello", False)
    steps = (StepTiming(0.5, 0.75, 3), StepTiming(0.0, 0.25, 2))
    events = [Timed(0, steps[:1]), Tokens(0, ids[:1]), Timed(0, steps[1:]), Tokens(0, ids[1:]), Finished(0, "length")]
    pieces = list(generate.run(ScriptedEngine(events), ask(), text))
    assert [type(piece) for piece in pieces][:4] == [Step, Delta, Step, Delta]
    choice = generate.gather(pieces).choices[0]
    assert [(step.waited, step.elapsed, step.batch_size) for step in choice.steps] == [(0.5, 0.75, 3), (0.0, 0.25, 2)]
    assert choice.text == "hello"


def test_each_token_has_its_log_probability(text, ask):
    """A choice has one for each of its token ids, also for those without text: up to the token that ended it."""
    ids = (*text.encode("one STOP", False), 9)
    scores = tuple(TokenLogprob(token, -0.1 * place) for place, token in enumerate(ids))
    engine = ScriptedEngine([Tokens(0, ids[:1], scores[:1]), Tokens(0, ids[1:], scores[1:]), Finished(0, "stop")])
    choice = _reply(engine, ask(stop="STOP", logprobs=0), text).choices[0]
    assert choice.token_ids == ids[:-1]
    assert choice.token_logprobs == tuple(score.logprob for score in scores[:-1])
    assert choice.cum_logprob == pytest.approx(sum(score.logprob for score in scores[:-1]))


@pytest.mark.parametrize("together", [1, 2, 5])
def test_logits_are_those_of_the_tokens(text, ask, together):
    """However rows and tokens come, a choice has the rows of its own tokens: none of what came after a stop string."""
    ids = (*text.encode("one STOP", False), 9)
    rows = [bytes([place] * 8) for place in range(len(ids))]
    events = [
        Logits(0, "context", 0, 2, b"a" * 16),
        Logits(0, "context", 2, 1, b"b" * 8),
        *(
            Logits(0, "generation", start, len(part), b"".join(part))
            for start in range(0, len(ids), together)
            for part in [rows[start : start + together]]
        ),
        *(Tokens(0, ids[i : i + 2]) for i in range(0, len(ids), 2)),
        Finished(0, "length"),
    ]
    choice = _reply(ScriptedEngine(events), ask(stop="STOP"), text).choices[0]
    assert choice.context_logits == b"a" * 16 + b"b" * 8
    assert choice.generation_logits == b"".join(rows[: len(choice.token_ids)])
    assert len(choice.token_ids) == len(ids) - 1
