"""Replies of ``generate`` and ``generate_stream`` in MindIE's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError
from ...interface.reply import Delta, Done, Ended, Piece, Reply, ReplyFinish, Step
from ...interface.request import ValidRequest
from .. import sse
from ..mindie.errors import error_body
from ..mindie.replies import milliseconds
from ..openai.replies import model_name
from .requests import Echo, echo_of

END_TEXT = "</s>"  # the literal in the document's last event, whatever the model's end-of-text token is
# field names used below the dialects, and their names here
_NAMES = (
    (re.compile(r"max_tokens(?=:)"), "parameters.max_new_tokens"),
    (re.compile(r"top_k(?=:)"), "parameters.top_k"),
    (re.compile(r"prompt(?=:)"), "text_input"),
)


def event(data: dict[str, Any]) -> bytes:
    """Encode one server-sent event, without a space after the colon."""
    return sse.event(data, space=b"")


def error_of(error: ServingError) -> dict[str, Any]:
    """Return the object of an error, with the field names of this form."""
    found = error_body(error)
    for pattern, name in _NAMES:
        if match := pattern.match(error.message):
            return found | {"error": name + error.message[match.end() :]}
    return found


def finish_reason(reason: ReplyFinish, stop_reason: str | int | None) -> str:
    """Return ``length``, ``stop_sequence`` for a stop string or id of the caller or the endpoint, or ``eos_token``."""
    if reason in ("length", "abort", "content_filter"):
        return "length"
    return "eos_token" if stop_reason is None else "stop_sequence"


def head(request: ValidRequest, echo: Echo, text: str) -> dict[str, Any]:
    """Return id, model_name, model_version (that of the URL) and text_output, with which replies and events begin."""
    return {
        "id": echo.id or request.request_id,
        "model_name": model_name(request),
        "model_version": echo.version,
        "text_output": text,
    }


def reply(request: ValidRequest, whole: Reply, echoed: bytes) -> dict[str, Any]:
    """Return the object of a reply that is not streamed."""
    echo, choice, steps = echo_of(echoed), whole.choices[0], whole.choices[0].steps
    reason = finish_reason(choice.finish_reason, choice.stop_reason)
    ending = END_TEXT if request.form.end_text and reason == "eos_token" else ""
    found = head(request, echo, choice.text + ending)
    if echo.details:
        found["details"] = {
            "finish_reason": reason,
            "generated_tokens": whole.usage.completion_tokens,
            **_costs(request, steps[0].elapsed if steps else None, sum(step.elapsed for step in steps[1:])),
            "batch_size": [step.batch_size for step in steps],
            "queue_wait_time": [microseconds(step.waited) for step in steps],
        }
    if echo.perf_stat:
        found["perf_stat"] = perf_stat(steps)
    return found


def microseconds(seconds: float) -> int:
    return round(seconds * 10**6)


def _costs(request: ValidRequest, first: float | None, later: float) -> dict[str, Any]:
    """Return the milliseconds up to the first token and after it, from seconds; null if the endpoint follows the
    document, where they are null."""
    if not request.form.times or first is None:
        return {"first_token_cost": None, "decode_cost": None}
    return {"first_token_cost": milliseconds(first), "decode_cost": milliseconds(later)}


def perf_stat(steps: tuple[Step, ...] | list[Step]) -> dict[str, Any]:
    """Return how long each step took and waited, with the field names of MindIE's chats and of ``details``."""
    times = [milliseconds(step.elapsed) for step in steps]
    return {
        "prefill_time": times[0] if times else None,
        "decode_time_arr": times[1:],
        "batch_size": [step.batch_size for step in steps],
        "queue_wait_time": [microseconds(step.waited) for step in steps],
    }


class Stream:
    """The encoder of one streamed reply: an event for each text, and a last one that says why it ended; no ``[DONE]``.

    An event's details cover the steps since the event before: ``queue_wait_time`` is their sum, ``batch_size`` that of
    the last step. In the last event ``queue_wait_time`` is the sum over all steps, as in the document.
    """

    content_type = "text/event-stream"
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest, echoed: bytes) -> None:
        self._request, self._echo = request, echo_of(echoed)
        self._steps: list[Step] = []
        self._told = 0  # number of steps that events have covered
        self._later = 0.0  # seconds of all steps but the first
        self._num_tokens = 0
        self._ended: Ended | None = None

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            self._num_tokens += piece.num_tokens
            return self._event(piece.text) if piece.text else b""
        if isinstance(piece, Step):
            self._later += piece.elapsed if self._steps else 0.0
            self._steps.append(piece)
        elif isinstance(piece, Ended):
            self._ended = piece
        elif isinstance(piece, Done):
            return self._last(piece)
        return b""

    def waiting(self) -> bytes:
        return self._event("")

    def error(self, error: ServingError) -> bytes:
        return event(error_of(error))

    def _event(self, text: str) -> bytes:
        found = head(self._request, self._echo, text)
        if self._echo.details:
            new, self._told = self._steps[self._told :], len(self._steps)
            found["details"] = self._details(self._num_tokens, new)
        return event(found)

    def _last(self, piece: Done) -> bytes:
        ended = self._ended or Ended(index=0, finish_reason="abort")
        reason = finish_reason(ended.finish_reason, ended.stop_reason)
        ending = END_TEXT if self._request.form.end_text and reason == "eos_token" else ""
        found = head(self._request, self._echo, ending)
        if self._echo.details:
            details = self._details(piece.usage.completion_tokens, self._steps)
            found["details"] = {"finish_reason": reason} | details
        if self._echo.perf_stat:
            found["perf_stat"] = perf_stat(self._steps)
        return event(found)

    def _details(self, generated: int, steps: list[Step]) -> dict[str, Any]:
        return {
            "generated_tokens": generated,
            **_costs(self._request, self._steps[0].elapsed if self._steps else None, self._later),
            "batch_size": steps[-1].batch_size if steps else None,
            "queue_wait_time": microseconds(sum(step.waited for step in steps)),
        }
