"""Guardrails on the pieces of a reply: what is masked or blocked does not depend on how the reply is cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, spoken

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.guardrails import Pii, TextRules
from mlflow_llm.serving.interface.reply import CallDelta, Choice, Delta, Done, Ended, Piece, Usage
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply import generate
from mlflow_llm.serving.tasks.reply.guarded_run import GuardedRun, filtered_arguments
from mlflow_llm.serving.tasks.text_filter import filtered

MASK = TextRules(pii=Pii(behavior="MASK"))
BLOCK = TextRules(invalid_keywords=("secret",), pii=Pii(behavior="BLOCK"))
WORDS = ["ada@example.org", "secret", "secretly", "+49 30 1234567", "4111 1111 1111 1111", "plain", " ", ", ", "1", "é"]


class Scripted:
    """A run whose events are pieces."""

    is_complete = False

    def begin(self) -> Iterator[Piece]:
        return iter(())

    def feed(self, event: Any) -> Iterable[Piece]:
        return (event,)

    def end(self) -> Iterator[Piece]:
        yield Done(usage=Usage(prompt_tokens=1))


class Finishing:
    """A stream that notes which sequences are to end."""

    def __init__(self) -> None:
        self.finished: list[int] = []

    def finish(self, index: int) -> None:
        self.finished.append(index)


def cut(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(len(text) + 1)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def reply_of(pieces: list[Piece], rules: TextRules) -> tuple[Choice, list[int]]:
    """Return the choice that is left of ``pieces``, and the sequences that were ended."""
    stream = Finishing()
    run = GuardedRun(Scripted(), stream, rules)  # type: ignore[arg-type]
    left = [*run.begin(), *(one for piece in pieces for one in run.feed(piece)), *run.end()]  # type: ignore[arg-type]
    (choice,) = generate.gather(left).choices
    return choice, stream.finished


@pytest.mark.parametrize("rules", [MASK, BLOCK], ids=["mask", "block"])
@settings(max_examples=200, deadline=None)
@given(
    reasoning=st.lists(st.sampled_from(WORDS), max_size=5),
    said=st.lists(st.sampled_from(WORDS), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_no_cut_changes_a_reply(rules: TextRules, reasoning: list[str], said: list[str], seed: int) -> None:
    """Reasoning, text and the arguments of calls are those of the whole reply, filtered, up to the first block."""
    draw = random.Random(seed)
    thought, text = "".join(reasoning), "".join(said)
    arguments = msgspec.json.encode({"to": said, "n": 1}).decode()
    pieces: list[Piece] = [Delta(index=0, text="", reasoning=one, num_tokens=1) for one in cut(thought, draw)]
    pieces += [Delta(index=0, text=one, num_tokens=1) for one in cut(text, draw)]
    for number in range(2):
        pieces.append(Delta(index=0, text="", calls=(CallDelta(index=number, id=f"c{number}", name="send"),)))
        for one in cut(arguments, draw):
            pieces.append(Delta(index=0, text="", calls=(CallDelta(index=number, arguments=one),), num_tokens=1))
    choice, finished = reply_of([*pieces, Ended(index=0, finish_reason="tool_calls")], rules)
    expected, rule = filtered(thought, rules)
    assert choice.reasoning == expected
    if rule is None:
        expected, rule = filtered(text, rules)
        assert choice.text == expected
    if rule is None:
        expected, rule = filtered_arguments(arguments, rules)
        assert [call.arguments for call in choice.calls] == ([expected] * 2 if rule is None else [])
    assert (choice.finish_reason, finished) == (("tool_calls", []) if rule is None else ("content_filter", [0]))


def test_arguments_without_a_match_stay_as_they_are() -> None:
    """Spaces and escapes of the model are kept; a call that was cut off is filtered as text."""
    for arguments in ('{ "a" : "\\u00e9" }', '{"a": 1e5', ""):
        assert filtered_arguments(arguments, MASK) == (arguments, None)
    # decoded, but too deep to be read entry by entry
    deep = '{"to": ' + "[" * 900 + '"ada@example.org"' + "]" * 900 + "}"
    assert filtered_arguments(deep, MASK) == (deep.replace("ada@example.org", "[redacted]"), None)
    assert filtered_arguments('{"to": "ada@example.org", "c', MASK)[0] == '{"to": "[redacted]", "c'
    assert filtered_arguments("to ada@example.org", MASK, custom=True)[0] == "to [redacted]"


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_a_reply_of_an_engine_is_masked(text: Any, endpoint: Any, chunk: int) -> None:
    """The text is masked however tokens arrive, every token counts, and no token id tells what was masked."""
    ids = text.encode("write to ada@example.org today", False)
    request = prepare(DIALECTS["mlflow"].read({"prompt": "hello"}), endpoint)
    counted: list[int] = []
    engine = ScriptedEngine(spoken(0, ids, chunk=chunk))
    pieces = list(generate.run(engine, request, text, lambda _, count: counted.append(count), MASK))
    reply = generate.gather(pieces)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("write to [redacted] today", "stop")
    assert sum(counted) == reply.usage.completion_tokens >= len(ids)
    assert reply.choices[0].token_ids == ()


def test_a_blocked_choice_ends_in_the_engine_and_the_other_goes_on(text: Any, endpoint: Any) -> None:
    """Its tokens until then are in the usage, and nothing of it follows its end."""
    first, second = text.encode("tell a secret now", False), text.encode("quick brown fox", False)
    request = prepare(DIALECTS["mlflow"].read({"prompt": "hello", "n": 2}), endpoint)
    engine = ScriptedEngine([*spoken(0, first), *spoken(1, second)])
    counted: list[int] = []
    pieces = list(generate.run(engine, request, text, lambda _, count: counted.append(count), BLOCK))
    reply = generate.gather(pieces)
    assert [(one.text, one.finish_reason) for one in reply.choices] == [
        ("tell a ", "content_filter"), ("quick brown fox", "stop")
    ]  # fmt: skip
    assert reply.usage.completion_tokens == sum(counted) > len(second)
    ends = [place for place, piece in enumerate(pieces) if isinstance(piece, Ended) and piece.index == 0]
    assert len(ends) == 1
    assert not any(getattr(piece, "index", None) == 0 for piece in pieces[ends[0] + 1 :])
