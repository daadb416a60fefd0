"""Replies of MindIE's chat completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError
from ...interface.reply import CallDelta, Choice, Delta, Done, Ended, Piece, Reply, ReplyCall, ReplyFinish, Usage
from ...interface.request import ValidRequest
from ..openai.replies import DONE, event, head
from .errors import error_body

ID_LENGTH = len("call_") + 8  # as the ids of calls in the document


def reply(request: ValidRequest, whole: Reply) -> dict[str, Any]:
    """Return the object of a reply that is not streamed.

    Times are in milliseconds: ``prefill_time`` to the first token (0 if a constraint left the model nothing to
    generate), then ``decode_time_arr`` with one for each step that gave more tokens.
    """
    choice = whole.choices[0]
    times = [milliseconds(step.elapsed) for step in choice.steps]
    return {
        **head(request),
        "choices": [
            {
                "index": 0,
                "message": _message(request, choice),
                "finish_reason": finish_reason(choice.finish_reason, choice.stop_reason, called=bool(choice.calls)),
            }
        ],
        "usage": _usage(whole.usage),
        "prefill_time": times[0] if times else 0.0,
        "decode_time_arr": times[1:],
    }


def milliseconds(seconds: float) -> float:
    """Convert seconds to milliseconds, rounded to microseconds."""
    return round(seconds * 1000, 3)


def _message(request: ValidRequest, choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        found["reasoning_content"] = choice.reasoning
    if request.tools is not None:
        found["tool_calls"] = [_call(call) for call in choice.calls] or None
    return found


def _call(call: ReplyCall) -> dict[str, Any]:
    function = {"arguments": call.arguments, "name": call.name}
    return {"function": function, "id": call.id[:ID_LENGTH], "type": "function"}


def finish_reason(reason: ReplyFinish, stop: str | int | None, *, called: bool) -> str:
    """Return ``length``; ``stop`` after a stop string, which may have cut off a call; ``tool_calls``; else ``stop``."""
    if reason in ("length", "abort", "content_filter"):  # "length" says that the text is not complete
        return "length"
    return "tool_calls" if called and not isinstance(stop, str) else "stop"


def _usage(counts: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
    }


class Stream:
    """The encoder of one streamed reply: every chunk has a role, the last one also usage; then comes ``[DONE]``.

    With ``fullTextEnabled`` every chunk has the whole text so far, and the last one ``full_text``. Calls are always
    sent as deltas, as in OpenAI's API.
    """

    content_type = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest) -> None:
        self._head = head(request, streamed=True)
        self._is_full = request.form.full_text
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._called = False
        self._ended: Ended | None = None

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            return self._said(piece)
        if isinstance(piece, Ended):
            self._ended = piece
        if isinstance(piece, Done):
            return self._last(piece)
        return b""

    def waiting(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def error(self, error: ServingError) -> bytes:
        return event(error_body(error)) + DONE

    def _said(self, piece: Delta) -> bytes:
        if not (piece.num_tokens or piece.text or piece.reasoning or piece.calls):
            return b""
        delta: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            self._called = True
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        if self._is_full:
            self._texts.append(piece.text)
            self._thoughts.append(piece.reasoning)
            delta |= self._so_far()
        return self._chunk(delta, None)

    def _so_far(self) -> dict[str, str]:
        self._texts = ["".join(self._texts)]
        self._thoughts = ["".join(self._thoughts)]
        thought = {"reasoning_content": self._thoughts[0]} if self._thoughts[0] else {}
        return {"content": self._texts[0]} | thought

    def _last(self, piece: Done) -> bytes:
        ended = self._ended or Ended(index=0, finish_reason="abort")
        reason = finish_reason(ended.finish_reason, ended.stop_reason, called=self._called)
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        full: dict[str, Any] = {}
        if self._is_full:
            delta |= self._so_far()
            full = {"full_text": delta["content"]}
        return self._chunk(delta, reason, **full, usage=_usage(piece.usage)) + DONE

    def _chunk(self, delta: dict[str, Any], reason: str | None, **more: Any) -> bytes:
        return event({**self._head, **more, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"arguments": call.arguments, "name": call.name}
    return {"index": call.index, "function": function, "id": (call.id or "")[:ID_LENGTH], "type": "function"}
