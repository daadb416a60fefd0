"""A dialect is a pure codec: bytes and plain objects in and out; no Flask, no clock, no engine.

A new dialect is a module that offers this protocol and is listed in ``dialects/__init__.py``; ours are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from ..errors import ServingError
from ..reply import Piece, Reply
from ..request import RawRequest, Task, ValidRequest


class ErrorBody(Struct, frozen=True, kw_only=True):
    """An error as it goes over the wire."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = {}


class StreamEncoder(Protocol):
    """Encodes one streamed reply. It may keep state (the first chunk carries the role); one per request."""

    content_type: str

    def encode(self, piece: Piece) -> bytes:
        """Bytes for one piece; b"" where the dialect says nothing of it. ``Done`` closes the stream."""
        ...

    def error(self, error: ServingError) -> bytes:
        """A final event for an error after the status line has gone out."""
        ...


class Dialect(Protocol):
    name: str

    def decode(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        """A parsed JSON object to a raw request. ``task`` None: it follows from the body.

        Raises ``InvalidField`` for a field that is unknown, of a wrong type, out of range, or not built yet.
        """
        ...

    def encode(self, request: ValidRequest, reply: Reply) -> dict[str, Any]:
        """The JSON object of a reply that is not streamed."""
        ...

    def stream(self, request: ValidRequest) -> StreamEncoder: ...

    def error(self, error: ServingError) -> ErrorBody: ...
