"""Replies of the Messages API: the message object, and the events of a stream.

Source of the format: the API reference of ``/v1/messages`` and its page on streaming. ``input_tokens`` does not include
the tokens that the prefix cache had: the prompt has ``input_tokens + cache_read_input_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...interface.errors import ServingError
from ...interface.reply import CallDelta, Choice, Delta, Done, Ended, Piece, Reply, ReplyCall, Usage
from ...interface.request import ValidRequest
from ..openai.replies import model_name
from ..sse import event
from ..text_template import TextTemplate

STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "abort": "max_tokens",
    "content_filter": "refusal",
}


def message(request: ValidRequest, whole: Reply) -> dict[str, Any]:
    """Return the object of a reply that is not streamed."""
    (choice,) = whole.choices
    content = list(_content(request, choice))
    called = any(block["type"] == "tool_use" for block in content)
    return {
        **_head(request),
        "content": content,
        **_end(request, choice.finish_reason, choice.stop_reason, called),
        "usage": {**_input(whole.usage), **_output(whole.usage), "service_tier": "standard"},
    }


def _head(request: ValidRequest) -> dict[str, Any]:
    return {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": model_name(request)}


def _end(request: ValidRequest, finish: str, stop: str | int | None, called: bool) -> dict[str, Any]:
    """Return why a reply ended.

    A reply that was cut off has that reason even if it contains calls, or ends within the arguments of one. Otherwise a
    call is a reason of its own here, even if the request named the tool.
    """
    if finish == "stop" and isinstance(stop, str) and stop in request.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if finish in ("stop", "tool_calls") and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish == "length" and request.clipped:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": "end_turn" if finish == "tool_calls" else STOP_REASONS[finish], "stop_sequence": None}


def _input(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _output(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {"output_tokens": usage.completion_tokens}
    if usage.reasoning_tokens:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return found


def _content(request: ValidRequest, choice: Choice) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": _signature(request)}
    if choice.text:
        yield {"type": "text", "text": choice.text}
    for call in choice.calls:
        yield _tool_use(call)


def _signature(request: ValidRequest) -> str:
    """Return a block's signature, which names its reply. To callers, who send it back with the block, it is opaque."""
    return request.request_id


def _tool_use(call: ReplyCall) -> dict[str, Any]:
    """Return the block of a call.

    Arguments that were cut off are included as far as they go. If they are not even the beginning of an object, they
    call nothing and are returned as a text block.
    """
    found = _arguments(call.arguments)
    if found is None:
        return {"type": "text", "text": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": found}


def _arguments(text: str) -> dict[str, Any] | None:
    if not text.strip():
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        from pydantic_core import from_json  # the API's own client reads unfinished arguments with it

        try:
            found = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            return None
    return found if isinstance(found, dict) else None


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


class Stream:
    """The encoder of one streamed reply: ``message_start``; start, deltas and stop of each content block;
    ``message_delta`` and ``message_stop``. Blocks do not interleave."""

    content_type = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest, error_body: Any) -> None:
        self._request = request
        self._error_body = error_body
        self._started = False
        self._index = -1  # of the last block that was started
        self._open: tuple[str, int] | None = None  # type of the open block, and the index of its call
        self.template: TextTemplate | None = None  # that of the open text block
        self._called = False
        self._ended = Ended(index=0, finish_reason="abort")

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            return b"".join(self._delta(piece))
        if isinstance(piece, Ended):
            self._ended = piece
            return b""
        return b"".join(self._done(piece.usage)) if isinstance(piece, Done) else b""

    def waiting(self) -> bytes:
        return b"".join((*self._start(), event({"type": "ping"}, "ping")))

    def error(self, error: ServingError) -> bytes:
        body = self._error_body(error)
        return event(body, "error")

    def _delta(self, piece: Delta) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._changed({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._begin("text", {"text": ""})
            assert self.template is not None
            yield self.template.fill(piece.text)
        for call in piece.calls:
            yield from self._call(call)

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.id is not None:
            self._called = True
            yield from self._begin("tool_use", {"id": call.id, "name": call.name, "input": {}}, call.index)
        if call.arguments:
            yield self._changed({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, kind: str, fields: dict[str, Any], number: int = 0) -> Iterator[bytes]:
        """Start a block, unless it is the one that is open."""
        if self._open == (kind, number):
            return
        yield from self._start()
        yield from self._close()
        self._open = (kind, number)
        self._index += 1
        if kind == "text":
            self.template = TextTemplate(lambda text: self._changed({"type": "text_delta", "text": text}))
        yield _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _changed(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open[0] == "thinking":
            yield self._changed({"type": "signature_delta", "signature": _signature(self._request)})
        self._open = self.template = None
        yield _event("content_block_stop", index=self._index)

    def _start(self) -> Iterator[bytes]:
        """Start the message. The number of cached tokens is known only at the end: ``message_delta`` has all counts."""
        if self._started:
            return
        self._started = True
        usage = Usage(prompt_tokens=self._request.num_prompt_tokens)
        counts = {**_input(usage), **_output(usage), "service_tier": "standard"}
        end = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**_head(self._request), "content": [], **end, "usage": counts})

    def _done(self, usage: Usage) -> Iterator[bytes]:
        yield from self._start()
        yield from self._close()
        end = _end(self._request, self._ended.finish_reason, self._ended.stop_reason, self._called)
        yield _event("message_delta", delta=end, usage={**_input(usage), **_output(usage)})
        yield _event("message_stop")
