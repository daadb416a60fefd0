"""A dialect is a pure codec: it reads a request's headers and bytes, and writes a response's headers and bytes.

It uses no Flask, no clock and no engine. It owns its routes, the path prefixes under which errors take its form, the
JSON schemas that describe it, and its form of error. To add a dialect, write a module with a class of the protocol
``Dialect`` and add a line to ``dialects/__init__.py``: the server's routes, its OpenAPI document and its error
responses follow from them. The built-in dialects are added in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from msgspec import Struct

from ..interface.errors import ServingError
from ..interface.reply import Piece, Reply
from ..interface.request import RawRequest, Task, ValidRequest
from .text_template import TextTemplate

JSON = "application/json"


class Headers(Protocol):
    """A request's headers; the case of their names does not matter."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None if the request does not have it."""
        ...


class InferenceRoute(Struct, frozen=True):
    """A path to which tasks are posted.

    ``<name>`` in ``path`` (werkzeug's notation) is the endpoint; without it the body names one. If ``task`` is None, it
    follows from the body. ``content_types`` are the accepted types of bodies; JSON's includes ``+json`` types, and ""
    accepts a body without a type.
    """

    path: str
    task: Task | None
    summary: str
    content_types: tuple[str, ...] = (JSON,)


class Head(Struct, frozen=True):
    """The part of a request before its body. ``path`` has the values of the route's ``<variables>``."""

    route: InferenceRoute
    headers: Headers
    path: Mapping[str, str] = {}


class Exchange(Struct, frozen=True, kw_only=True):
    """An example of a task's requests and the types of its replies, for the OpenAPI document.

    ``example`` is the body of a request that runs. ``whole`` is the type of a reply that is not streamed, ``event``
    that of the data of a stream's events (see ``interface.type_schema``); None if a route has no such replies.
    ``media`` are the media types of a whole reply: the first one has the type ``whole``, others are binary. ``ends``
    says how a stream ends.
    """

    example: Mapping[str, Any] = {}
    whole: Any = None
    event: Any = None
    media: tuple[str, ...] = (JSON,)
    stream_media: str = "text/event-stream"
    ends: str = ""


class Encoded(Struct, frozen=True, kw_only=True):
    """A complete response as it is sent over HTTP."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class StreamEncoder(Protocol):
    """An encoder of one streamed reply. It may keep state (the first chunk carries the role), so each request has its
    own."""

    content_type: str
    headers: Mapping[str, str]

    def encode(self, piece: Piece) -> bytes:
        """Return the bytes for one piece; b"" if the dialect sends nothing for it. ``Done`` closes the stream."""
        ...

    def waiting(self) -> bytes:
        """Return bytes for a client that has waited for a while and has no part of the reply yet: the beginning of the
        stream at first, then a sign of life. It is called before ``encode`` has returned any bytes. b"" if there is
        nothing that the dialect's clients would bear."""
        ...

    def error(self, error: ServingError) -> bytes:
        """Return the last bytes of a stream that breaks off: its status line has already been sent."""
        ...


class TemplatedEncoder(Protocol):
    """A ``StreamEncoder`` with a template for deltas that are only text.

    While ``template`` is not None, and the next delta of the reply's only choice has nothing but text,
    ``template.fill`` makes the same bytes as ``encode``.
    """

    template: TextTemplate | None


def has_template(encoder: StreamEncoder) -> TypeGuard[TemplatedEncoder]:
    """Return whether an encoder is a ``TemplatedEncoder``."""
    return hasattr(encoder, "template")  # as the protocol itself would ask, which finds its attributes anew each time


class Dialect(Protocol):
    """The protocol of a dialect.

    ``prefixes`` are paths under which errors take this dialect's form even if none of its routes matches.
    ``request_id_header`` is the header, besides ``X-Request-Id``, in which its clients look for a request's id; None if
    there is no other. ``request_schemas`` and ``error_schema`` are JSON schemas, for the OpenAPI document.
    ``exchanges`` has what else the document says of a route, by the tasks of its bodies.
    """

    @property
    def name(self) -> str: ...

    @property
    def routes(self) -> tuple[InferenceRoute, ...]: ...

    @property
    def prefixes(self) -> tuple[str, ...]: ...

    @property
    def request_id_header(self) -> str | None: ...

    @property
    def request_schemas(self) -> Mapping[Task, Mapping[str, Any]]: ...

    @property
    def error_schema(self) -> Mapping[str, Any]: ...

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]: ...

    def decode(self, head: Head, body: bytes) -> RawRequest:
        """Read a request. Nothing is resolved here; ``tasks.prepare`` does that.

        Raises ``InvalidField`` for a field that is unknown, of a wrong type, out of range or not implemented, and
        ``RequestError`` for a body that cannot be read.
        """
        ...

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        """Encode a reply that is not streamed. ``echoed`` is what ``decode`` kept of the request (``Raw.echoed``)."""
        ...

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        """Return a new encoder for a streamed reply."""
        ...

    def error(self, error: ServingError) -> Encoded:
        """Encode the error of a request that was refused or has failed, with the status of the error's class.

        Every class of the tree in ``errors`` can be encoded.
        """
        ...
