"""What a reply holds, before a dialect puts it into bytes.

``tasks.generate`` turns an engine's events into these: detokenised, stop strings matched and trimmed, counted.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from msgspec import Struct

from .request import LogitsOf

ReplyFinish: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]


class Usage(Struct, frozen=True, kw_only=True):
    """Exact token counts: prompt as fed to the model, completion as sampled up to the token that ended the text.

    ``reasoning_tokens`` are those of the completion that are reasoning. ``draft_tokens`` were computed ahead beside it,
    and ``accepted_draft_tokens`` of them are in it; of both, those from a text that the caller predicted are
    ``accepted_prediction_tokens`` and ``rejected_prediction_tokens``, None where it predicted none. Nobody pays them.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TextLogprob(Struct, frozen=True, kw_only=True):
    """One token's text, its bytes (a token may be part of a character), log probability and alternatives.

    ``start`` is where its first character stands in the choice's text: tokens that are parts of one have the same.
    """

    token: str
    bytes: tuple[int, ...]
    token_id: int
    logprob: float | None
    start: int = 0
    top: tuple[TextLogprob, ...] = ()


class CallDelta(Struct, frozen=True, kw_only=True):
    """A piece of tool call number ``index`` of its choice (from 0). The first one of a call has ``id`` and ``name`` and
    no ``arguments``; later ones have only these: JSON, or the text of a custom tool. Calls do not interleave."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    custom: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """A step of choice ``index`` that gave it tokens, which are in the next delta; of a request with ``timings``.

    In seconds since its step before, for the first since the engine had the request: ``waited`` until the step began,
    ``elapsed`` until the tokens were there. ``batch_size``: sequences that ran in it.
    """

    index: int
    waited: float
    elapsed: float
    batch_size: int


class Delta(Struct, frozen=True, kw_only=True):
    """New text of choice ``index``; may be empty where only tokens were counted.

    ``reasoning`` is what the model thought between its markers, before or between texts; ``calls`` are pieces of tool
    calls. A delta has at most one of text, reasoning and calls. ``token_logprobs`` are those of ``token_ids``, where
    log probabilities were asked for: of every token, also of those that are no text (``logprobs``).
    """

    index: int
    text: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    token_logprobs: tuple[float, ...] = ()


class LogitRows(Struct, frozen=True, kw_only=True):
    """The next rows of choice ``index``'s logits: float32, little-endian, [num_rows, V]; see ``events.Logits``."""

    index: int
    of: LogitsOf
    num_rows: int
    data: bytes


class Ended(Struct, frozen=True, kw_only=True):
    """Choice ``index`` is complete. ``stop_reason``: the stop string or token id that ended it, or None."""

    index: int
    finish_reason: ReplyFinish
    stop_reason: str | int | None = None


class Vector(Struct, frozen=True, kw_only=True):
    """The embedding of input ``index``: little-endian float32 bytes."""

    index: int
    data: bytes


class Score(Struct, frozen=True, kw_only=True):
    """How well the texts of pair ``index`` fit each other."""

    index: int
    value: float


class Done(Struct, frozen=True, kw_only=True):
    """The request is complete; the last piece of every successful reply."""

    usage: Usage


Piece: TypeAlias = Delta | Step | LogitRows | Ended | Vector | Score | Done


class ReplyCall(Struct, frozen=True, kw_only=True):
    """A whole tool call; ``arguments`` is JSON, or the text of a custom tool."""

    id: str
    name: str
    arguments: str
    custom: bool = False


class TextLogprobs:
    """The log probabilities that are of a choice's text, as its deltas come: those of a token that has said nothing yet
    wait for what it turns out to begin. Those of reasoning and calls, and of the marks around them, are left out."""

    def __init__(self) -> None:
        self._waiting: tuple[TextLogprob, ...] = ()
        self._in_text = True

    def add(self, delta: Delta) -> tuple[TextLogprob, ...]:
        """Those that go with the text of ``delta``."""
        if delta.calls or delta.reasoning:
            self._waiting, self._in_text = (), False
            return ()
        self._waiting += delta.logprobs
        if delta.text and not self._in_text:
            self._waiting = _beginning(self._waiting, delta.text)
        return self._take() if delta.text else ()

    def rest(self) -> tuple[TextLogprob, ...]:
        """Those that waited when the text ended."""
        return self._take() if self._in_text else ()

    def _take(self) -> tuple[TextLogprob, ...]:
        found, self._waiting, self._in_text = self._waiting, (), True
        return found


def _beginning(entries: tuple[TextLogprob, ...], text: str) -> tuple[TextLogprob, ...]:
    """``entries`` from where ``text`` begins: before it stand the marks of what it comes after."""
    said = text.encode().lstrip()
    for i in range(len(entries)):
        data = b"".join(bytes(entry.bytes) for entry in entries[i:]).lstrip()
        if data and (data.startswith(said) or said.startswith(data)):
            return entries[i:]
    return entries


class Choice(Struct, frozen=True, kw_only=True):
    """One finished choice, gathered for a response that is not streamed. ``text_logprobs`` are those of ``logprobs``
    that are of the text, ``steps`` those that gave it tokens, where they are measured; ``token_logprobs`` are one for
    each of ``token_ids``.

    ``context_logits`` [prompt tokens, V] (of a prompt's first choice) and ``generation_logits`` [len(token_ids), V] are
    float32, little-endian, row by row; b"" where they were not asked for.
    """

    index: int
    text: str
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish_reason: ReplyFinish
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    text_logprobs: tuple[TextLogprob, ...] = ()
    steps: tuple[Step, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    context_logits: bytes = b""
    generation_logits: bytes = b""

    @property
    def cum_logprob(self) -> float:
        """The log probability of all ``token_ids`` together, the one that ended the text included (TensorRT-LLM's
        ``cum_log_probs``, also of a beam: no length penalty is in it)."""
        return math.fsum(self.token_logprobs)


class Reply(Struct, frozen=True, kw_only=True):
    """A whole reply: choices, vectors or scores in index order, and the usage."""

    choices: tuple[Choice, ...] = ()
    vectors: tuple[bytes, ...] = ()
    scores: tuple[float, ...] = ()
    usage: Usage

    @property
    def size(self) -> int:
        """About the bytes that it takes to say: what decides whether encoding it holds others up."""
        texts = sum(_length(choice) + 64 * _num_logprobs(choice) for choice in self.choices)
        logits = sum(len(choice.context_logits) + len(choice.generation_logits) for choice in self.choices)
        return texts + 4 * sum(map(len, self.vectors)) + logits


def _length(choice: Choice) -> int:
    return len(choice.text) + len(choice.reasoning) + sum(len(call.arguments) for call in choice.calls)


def _num_logprobs(choice: Choice) -> int:
    return len(choice.logprobs) * (1 + len(choice.logprobs[-1].top)) if choice.logprobs else 0
