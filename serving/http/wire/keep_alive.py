"""Keep-alive: a connection accepts another request only if it is known where the last one ended.

Otherwise the rest of a broken or unread body would be read as the next request (request smuggling); behind a proxy, it
could be taken for another client's request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from gunicorn.http.body import ChunkedReader

CHEAP_BYTES = 64 * 2**10  # up to this many unread bytes of an announced length are discarded to keep the connection


class Connection(Protocol):
    """The connection over which a request came. ``address`` is what it counts under; ``probes`` says that it came to
    the listener for probes."""

    address: str
    probes: bool

    def expect_head(self) -> None: ...

    def expect_body(self) -> None: ...


class RequestBody:
    """A request's body for WSGI, in place of gunicorn's, that knows whether its end was reached.

    After its end, the next bytes belong to the next head, so ``connection`` then applies the deadline for a head.
    """

    def __init__(self, request: Any, connection: Connection) -> None:
        self._request = request
        self.connection = connection
        self._stream = request.body
        self._chunked = isinstance(request.body.reader, ChunkedReader)
        headers = dict(request.headers)
        self._left = int(headers.get("CONTENT-LENGTH", 0))
        self._optional = "EXPECT" in headers
        self._ended = self._broken = False
        connection.expect_body()
        self._note_end()

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the body."""
        broken, self._broken = self._broken, True  # if the read raises, the position in the body is unknown
        data: bytes = self._stream.read(size)
        self._broken = broken
        self._left -= len(data)
        self._ended = len(data) < size
        self._note_end()
        return data

    def _note_end(self) -> None:
        if self.is_whole:
            self.connection.expect_head()

    @property
    def is_whole(self) -> bool:
        return not self._broken and (self._ended if self._chunked else self._left == 0)

    @property
    def _is_cheap(self) -> bool:
        # a client that waited for a 100 got one; it may now send the body or, because it got the response, omit it
        known = not (self._chunked or self._broken or self._ended or self._optional)
        return known and self._left <= CHEAP_BYTES

    def settle(self) -> None:
        """Decide, before the response's head is sent, whether the connection ends: it does unless the start of the next
        request can be found."""
        if not (self.is_whole or self._is_cheap):
            self._request.force_close()


def asks_to_close(headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether a request asks to close its connection.

    ``Connection`` is a list of options in one or several fields (RFC 9110, 7.6.1); gunicorn reads only a single one.
    """
    fields = (value for name, value in headers if name == "CONNECTION")
    return any(option.strip().lower() == "close" for value in fields for option in value.split(","))


def settle(environ: Mapping[str, Any]) -> None:
    """Call ``RequestBody.settle`` for the request of ``environ``, if it came over one of our connections."""
    body = environ.get("wsgi.input")
    if isinstance(body, RequestBody):
        body.settle()


def came_to_probes(environ: Mapping[str, Any]) -> bool:
    """Return whether the request of ``environ`` came to the listener for probes."""
    body = environ.get("wsgi.input")
    return isinstance(body, RequestBody) and body.connection.probes


def address_in(environ: Mapping[str, Any]) -> str:
    """Return what the request of ``environ`` counts under without a key: the address of its connection."""
    body = environ.get("wsgi.input")
    return body.connection.address if isinstance(body, RequestBody) else environ.get("REMOTE_ADDR") or ""
