"""The events of a streamed response, in order and numbered.

Source of the format: the API reference of the streaming events of ``/v1/responses``. Items do not interleave: each is
added, grows, and is done before the next. A stream ends with ``response.completed``, ``response.incomplete``, or, if it
breaks off, ``error`` and ``response.failed``; there is no ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgspec

from ...interface.errors import ServingError
from ...interface.reply import CallDelta, Delta, Done, Ended, Piece, ReplyCall, TextLogprob, TextLogprobs
from ...interface.request import ValidRequest
from .. import sse
from .errors import error_object, failure
from .replies import (
    Namespaces,
    call_item,
    call_type,
    cuts,
    ended,
    incomplete,
    item_id,
    logprobs,
    message_item,
    namespaces_of,
    reasoning_item,
    response_head,
    text_part,
)

_encoder = msgspec.json.Encoder()
_NO_TOOLS: Namespaces = {}


class _Item:
    """An item of the output that grows. ``call`` is its call, if it is one, of one of the tools in ``namespaces`` or
    another. Log probabilities are kept in encoded form, because the last events repeat all of them."""

    def __init__(self, kind: str, item: str, call: CallDelta | None = None, namespaces: Namespaces = _NO_TOOLS) -> None:
        self.kind, self.id, self.call, self._namespaces = kind, item, call, namespaces
        self._texts: list[str] = []
        self._scored: list[bytes] = []
        self._scored_with_bytes: list[bytes] = []

    def grow(self, text: str, found: tuple[TextLogprob, ...] = ()) -> msgspec.Raw:
        """Add a text, and return its log probabilities as an event has them."""
        self._texts.append(text)
        scored = [_encoder.encode(entry) for entry in logprobs(found, with_bytes=False)]
        self._scored += scored
        self._scored_with_bytes += [_encoder.encode(entry) for entry in logprobs(found)]
        return _list(scored)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def scored(self) -> msgspec.Raw:
        """The log probabilities so far, as an event has them."""
        return _list(self._scored)

    def begun(self) -> dict[str, Any]:
        """Return the item as it is added: a message and reasoning do not have their part yet, which is added next."""
        found = self._whole("", _NONE)
        if "status" in found:
            found["status"] = "in_progress"
        return found if self.call else found | {"content": []}

    def empty_part(self) -> dict[str, Any]:
        return self._part("", _NONE)

    def part(self) -> dict[str, Any]:
        """Return the part that has the item's text."""
        return self._part(self.text, _list(self._scored_with_bytes))

    def whole(self) -> dict[str, Any]:
        return self._whole(self.text, _list(self._scored_with_bytes))

    def _part(self, text: str, found: msgspec.Raw) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self.kind == "reasoning" else text_part(text, found)

    def _whole(self, text: str, found: msgspec.Raw) -> dict[str, Any]:
        if self.call is not None:
            call_id, name = self.call.id or "", self.call.name or ""
            call = ReplyCall(id=call_id, name=name, arguments=text, custom=self.call.custom)
            return call_item(self.id, call, self._namespaces)
        if self.kind == "reasoning":
            return reasoning_item(self.id, text)
        return message_item(self.id, text_part(text, found))


def _list(entries: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(entries) + b"]")


_NONE = _list([])


class ResponseStream:
    """The encoder of one streamed response as server-sent events."""

    content_type = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest, echoed: bytes) -> None:
        self._request = request
        self._head = response_head(request, echoed)
        self._namespaces = namespaces_of(echoed)
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []  # items that are done
        self._item: _Item | None = None
        self._logprobs = TextLogprobs()
        self._ended = Ended(index=0, finish_reason="abort")

    def encode(self, piece: Piece) -> bytes:
        return b"".join(self._events(piece))

    def waiting(self) -> bytes:
        return b"".join(self._begin()) or sse.COMMENT

    def error(self, error: ServingError) -> bytes:
        return b"".join(self._failed(error))

    def _events(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Delta):
            yield from self._begin()
            yield from self._delta(piece)
        elif isinstance(piece, Ended):
            self._ended = piece
        elif isinstance(piece, Done):
            yield from self._begin()
            yield from self._done(piece)

    def _begin(self) -> Iterator[bytes]:
        if self._number == 0:
            yield self._event("response.created", response=self._head)
            yield self._event("response.in_progress", response=self._head)

    def _delta(self, piece: Delta) -> Iterator[bytes]:
        if piece.reasoning:
            item = yield from self._open("reasoning")
            item.grow(piece.reasoning)
            yield self._of_part("response.reasoning_text.delta", item, delta=piece.reasoning)
        found = self._logprobs.add(piece)
        if piece.text:
            item = yield from self._open("message")
            yield self._said(item, piece.text, found)
        for call in piece.calls:
            yield from self._call(call)

    def _said(self, item: _Item, text: str, found: tuple[TextLogprob, ...]) -> bytes:
        scored = item.grow(text, found)
        return self._of_part("response.output_text.delta", item, delta=text, logprobs=scored)

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.id is not None:
            yield from self._close()
            yield from self._add(call_type(call.custom), call)
        item = self._item
        assert item is not None, "arguments follow the call that they are of"
        if call.arguments:
            item.grow(call.arguments)
            yield self._of_item(f"{_GROWS[item.kind][0]}.delta", item, delta=call.arguments)

    def _open(self, kind: str) -> Generator[bytes, None, _Item]:
        """Return the open item of ``kind``; if there is none, close the open item and add one."""
        if self._item is None or self._item.kind != kind:
            yield from self._close()
            yield from self._add(kind)
        assert self._item is not None
        return self._item

    def _add(self, kind: str, call: CallDelta | None = None) -> Iterator[bytes]:
        self._item = item = _Item(kind, item_id(self._request, kind, len(self._output)), call, self._namespaces)
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.begun())
        if call is None:
            yield self._of_part("response.content_part.added", item, part=item.empty_part())

    def _close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        """End the open item; if ``is_cut``, the end of the reply cut it off."""
        if (item := self._item) is None:
            return
        text = item.text
        event, name = _GROWS[item.kind]
        if item.call is not None:
            named = {} if item.call.custom else {"name": item.whole()["name"]}
            yield self._of_item(f"{event}.done", item, **named, **{name: text})
        else:
            scored = {} if item.kind == "reasoning" else {"logprobs": item.scored}
            yield self._of_part(f"{event}.done", item, **scored, text=text)
            yield self._of_part("response.content_part.done", item, part=item.part())
        whole = incomplete(item.whole()) if is_cut else item.whole()
        yield self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._item = None

    def _done(self, piece: Done) -> Iterator[bytes]:
        item, last = self._item, self._ended
        is_cut = item is not None and item.kind == "function_call" and cuts(last.stop_reason, item.text)
        end = ended(self._request, last.finish_reason, piece.usage, piece.completed, is_cut=is_cut)
        if self._item is None and not self._output:
            yield from self._add("message")
        if (rest := self._logprobs.rest()) and self._item is not None and self._item.kind == "message":
            yield self._said(self._item, "", rest)
        yield from self._close(is_cut=end["status"] == "incomplete")
        yield self._event(f"response.{end['status']}", response=self._head | end | {"output": self._output})

    def _failed(self, error: ServingError) -> Iterator[bytes]:
        yield from self._begin()
        if self._item is not None:
            self._output.append(incomplete(self._item.whole()))
            self._item = None
        said = error_object(error)["error"]
        yield self._event("error", **{name: said[name] for name in ("code", "message", "param")})
        end = {"status": "failed", "error": failure(error), "output": self._output}
        yield self._event("response.failed", response=self._head | end)

    def _of_item(self, kind: str, item: _Item, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=len(self._output), **fields)

    def _of_part(self, kind: str, item: _Item, **fields: Any) -> bytes:
        return self._of_item(kind, item, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event({"type": kind, "sequence_number": number, **fields}, kind)


# By item type: the event with which it grows and is done, and the name of the text in the latter.
_GROWS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
