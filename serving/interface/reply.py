"""The pieces and the content of a reply, before a dialect encodes it.

``tasks.generate`` turns an engine's events into these: it detokenises, matches and trims stop strings, and counts.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from .request import LogitsOf

ReplyFinish: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class Usage(Struct, frozen=True, kw_only=True):
    """Exact token counts: the prompt as fed to the model, and the completion as sampled, including the ending token.

    ``reasoning_tokens`` is the part of the completion that is reasoning. ``draft_tokens`` were proposed by speculative
    decoding, and ``accepted_draft_tokens`` of them became part of the completion. Of both, tokens of a text that the
    caller predicted are counted as ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` (None if there was
    no prediction). Draft tokens are not billed.
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

    ``start`` is the position of its first character in the choice's text; tokens of the same character share it.
    """

    token: str
    bytes: tuple[int, ...]
    token_id: int
    logprob: float | None
    start: int = 0
    top: tuple[TextLogprob, ...] = ()


class CallDelta(Struct, frozen=True, kw_only=True):
    """A piece of tool call number ``index`` of its choice (from 0).

    The first piece of a call has ``id`` and ``name`` but no ``arguments``. Later ones have only ``arguments``: JSON, or
    the text of a custom tool. Calls do not interleave.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    custom: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """A step that produced the tokens in the next delta of choice ``index``, for a request with ``timings``.

    Times are in seconds since the choice's previous step, or, for its first step, since the engine received the
    request: ``waited`` until the step began, ``elapsed`` until the tokens were available. ``batch_size`` is the number
    of sequences that ran in the step.
    """

    index: int
    waited: float
    elapsed: float
    batch_size: int


class Delta(Struct, frozen=True, kw_only=True):
    """New text of choice ``index``; it may be empty if tokens were only counted.

    ``reasoning`` is what the model wrote between its reasoning markers, before or between texts; ``calls`` are pieces
    of tool calls. A delta has at most one of text, reasoning and calls. If log probabilities were asked for (see
    ``logprobs``), ``token_logprobs`` has those of all ``token_ids``, including tokens that are not text.
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
    """Choice ``index`` is complete. ``stop_reason`` is the stop string or token id that ended it, or None."""

    index: int
    finish_reason: ReplyFinish
    stop_reason: str | int | None = None


class Vector(Struct, frozen=True, kw_only=True):
    """The embedding of input ``index``: little-endian float32 bytes."""

    index: int
    data: bytes


class Score(Struct, frozen=True, kw_only=True):
    """The score of pair ``index``: how well its texts match."""

    index: int
    value: float


class Done(Struct, frozen=True, kw_only=True):
    """The request is complete; the last piece of every successful reply. ``completed`` is a label, not used for
    anything else: the Unix time at which a text was complete. ``trace`` is the trace of the request in MLflow's form,
    if the request asks for it."""

    usage: Usage
    completed: int | None = None
    trace: dict[str, Any] | None = None


Piece: TypeAlias = Delta | Step | LogitRows | Ended | Vector | Score | Done


class ReplyCall(Struct, frozen=True, kw_only=True):
    """A whole tool call; ``arguments`` is JSON, or the text of a custom tool."""

    id: str
    name: str
    arguments: str
    custom: bool = False


class TextLogprobs:
    """A selection of the log probabilities that belong to a choice's text, as its deltas arrive.

    Those of a token without text so far wait until it is known what the token begins. Those of reasoning, of calls and
    of the markers around them are left out.
    """

    def __init__(self) -> None:
        self._waiting: tuple[TextLogprob, ...] = ()
        self._in_text = True

    def add(self, delta: Delta) -> tuple[TextLogprob, ...]:
        """Return those that belong to the text of ``delta``."""
        if delta.calls or delta.reasoning:
            self._waiting, self._in_text = (), False
            return ()
        self._waiting += delta.logprobs
        if delta.text and not self._in_text:
            self._waiting = _beginning(self._waiting, delta.text)
        return self._take() if delta.text else ()

    def rest(self) -> tuple[TextLogprob, ...]:
        """Return those that were still waiting when the text ended."""
        return self._take() if self._in_text else ()

    def _take(self) -> tuple[TextLogprob, ...]:
        found, self._waiting, self._in_text = self._waiting, (), True
        return found


def _beginning(entries: tuple[TextLogprob, ...], text: str) -> tuple[TextLogprob, ...]:
    """Return ``entries`` from the beginning of ``text`` on: before it are the markers of what preceded the text."""
    said = text.encode().lstrip()
    for i in range(len(entries)):
        data = b"".join(bytes(entry.bytes) for entry in entries[i:]).lstrip()
        if data and (data.startswith(said) or said.startswith(data)):
            return entries[i:]
    return entries


class Choice(Struct, frozen=True, kw_only=True):
    """One finished choice, gathered for a response that is not streamed.

    ``text_logprobs`` are those of ``logprobs`` that belong to the text; ``token_logprobs`` has one for each of
    ``token_ids``. ``steps`` are those that produced its tokens, if they were measured.

    ``context_logits`` [prompt tokens, V] (of a prompt's first choice) and ``generation_logits`` [len(token_ids), V] are
    float32, little-endian, row by row; b"" if they were not asked for.
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
        """The log probability of all ``token_ids`` together, including the one that ended the text.

        This is TensorRT-LLM's ``cum_log_probs``, for a beam as well: it includes no length penalty.
        """
        return math.fsum(self.token_logprobs)


class Reply(Struct, frozen=True, kw_only=True):
    """A whole reply: choices, vectors or scores in order of index, and the usage, time and trace of ``Done``."""

    choices: tuple[Choice, ...] = ()
    vectors: tuple[bytes, ...] = ()
    scores: tuple[float, ...] = ()
    usage: Usage
    completed: int | None = None
    trace: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """The approximate size of the reply in bytes, by which it is decided whether encoding it delays others."""
        texts = sum(_length(choice) + 64 * _num_logprobs(choice) for choice in self.choices)
        logits = sum(len(choice.context_logits) + len(choice.generation_logits) for choice in self.choices)
        return texts + 4 * sum(map(len, self.vectors)) + logits


ID_BYTES = 40  # an integer beyond the small ones, and its place in a tuple
FLOAT_BYTES = 32  # a float, and its place in a tuple


def piece_size(piece: Piece) -> int:
    """Return about how many bytes a piece takes in memory."""
    size = sys.getsizeof(piece)
    if isinstance(piece, LogitRows | Vector):
        return size + sys.getsizeof(piece.data)
    if not isinstance(piece, Delta):
        return size
    texts = [piece.text, piece.reasoning]
    for call in piece.calls:
        size += sys.getsizeof(call)
        texts += [text for text in (call.arguments, call.id, call.name) if text]
    size += sum(sys.getsizeof(text) for text in texts if text)
    size += ID_BYTES * len(piece.token_ids) + FLOAT_BYTES * len(piece.token_logprobs)
    return size + sum(_logprob_bytes(entry) for entry in piece.logprobs)


def _logprob_bytes(entry: TextLogprob) -> int:
    own = sys.getsizeof(entry) + sys.getsizeof(entry.token) + sys.getsizeof(entry.bytes) + FLOAT_BYTES + 2 * ID_BYTES
    return own + sum(_logprob_bytes(other) for other in entry.top)


def _length(choice: Choice) -> int:
    return len(choice.text) + len(choice.reasoning) + sum(len(call.arguments) for call in choice.calls)


def _num_logprobs(choice: Choice) -> int:
    return len(choice.logprobs) * (1 + len(choice.logprobs[-1].top)) if choice.logprobs else 0
