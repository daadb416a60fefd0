"""A dialect is a pure codec: a request's headers and bytes in, an answer's headers and bytes out; no Flask, no clock,
no engine.

It owns its routes, the path prefixes in whose errors it speaks, the JSON schemas that describe it, and its form of
error. A new dialect is a module with a class of the protocol ``Dialect`` and a line in ``dialects/__init__.py``: the
server's routes, its OpenAPI document and its refusals follow from them. Ours are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from ..errors import ServingError
from ..reply import Piece, Reply
from ..request import RawRequest, Task, ValidRequest
from .text_template import TextTemplate

JSON = "application/json"


class Headers(Protocol):
    """A request's headers, found whatever the case of their names."""

    def get(self, name: str, /) -> str | None:
        """The value of a header; None where there is none."""
        ...


class InferenceRoute(Struct, frozen=True):
    """A path to which tasks are posted.

    ``<name>`` in ``path`` (werkzeug's notation) is the endpoint; without it the body names one. ``task`` None: it
    follows from the body. ``content_types`` are those of bodies; with JSON's, ``+json`` types are taken too, with "" a
    body of no type.
    """

    path: str
    task: Task | None
    summary: str
    content_types: tuple[str, ...] = (JSON,)


class Head(Struct, frozen=True):
    """What comes before a body. ``path`` has what stands in the place of the route's ``<variables>``."""

    route: InferenceRoute
    headers: Headers
    path: Mapping[str, str] = {}


class Encoded(Struct, frozen=True, kw_only=True):
    """A whole answer as it goes over HTTP."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class StreamEncoder(Protocol):
    """Encodes one streamed reply. It may keep state (the first chunk carries the role); one a request."""

    content_type: str
    headers: Mapping[str, str]

    def encode(self, piece: Piece) -> bytes:
        """Bytes for one piece; b"" where the dialect says nothing of it. ``Done`` closes the stream."""
        ...

    def error(self, error: ServingError) -> bytes:
        """The last bytes of a stream that breaks off: the status line has gone out."""
        ...


@runtime_checkable
class TemplatedEncoder(Protocol):
    """A ``StreamEncoder`` of which the text alone goes into a template, as long as it has one: where the next delta of
    the reply's only choice is nothing but text, ``fill`` makes the bytes of ``encode``."""

    template: TextTemplate | None


class Dialect(Protocol):
    """``prefixes``: paths under which a request is refused in this dialect's form though no route of its own is there.
    ``request_id_header``: where its clients look for a request's id, beside ``X-Request-Id``; None for nowhere else.
    ``request_schemas`` and ``error_schema`` are JSON schemas, for the OpenAPI document."""

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

    def decode(self, head: Head, body: bytes) -> RawRequest:
        """Raises ``InvalidField`` for a field that is unknown, of a wrong type, out of range, or not built yet, and
        ``RequestError`` for a body that cannot be read. Nothing is resolved here: that is ``tasks.prepare``."""
        ...

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        """A reply that is not streamed. ``echoed`` is what ``decode`` kept of the request (``Raw.echoed``)."""
        ...

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        """A new encoder for a reply that is streamed."""
        ...

    def error(self, error: ServingError) -> Encoded:
        """A request that is refused or has failed, with the status of the error's class. Every class of the tree in
        ``errors`` has a rendering."""
        ...
