"""Keep-alive: a connection takes another request only where it is known where the last one ended.

What follows a body that broke off, or was left unread, would be taken for a request (request smuggling): after a proxy,
another client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from gunicorn.http.body import ChunkedReader

CHEAP = 64 * 2**10  # unread bytes of an announced length that are read and dropped rather than the connection


class Connection(Protocol):
    """What a request came over: ``address`` is what it counts under, ``probes``: its listener is for probes."""

    address: str
    probes: bool

    def expect_head(self) -> None: ...

    def expect_body(self) -> None: ...


class RequestBody:
    """A request's body for WSGI, in place of gunicorn's, that knows whether its end was reached.

    What arrives after its end is the next head's, whose deadline ``connection`` then keeps.
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
        """Up to ``size`` bytes; fewer only where no more come."""
        broken, self._broken = self._broken, True  # where this raises, what follows is not known
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
        # a client that waited for a 100 has got one, and may send the body or, with the answer there, leave it out
        known = not (self._chunked or self._broken or self._ended or self._optional)
        return known and self._left <= CHEAP

    def settle(self) -> None:
        """Before the answer's head goes out: the connection ends with it, unless the next request can be found."""
        if not (self.is_whole or self._is_cheap):
            self._request.force_close()


def asks_to_close(headers: Iterable[tuple[str, str]]) -> bool:
    """Whether a request is its connection's last: a list of options, in one field or several (RFC 9110, 7.6.1), of
    which gunicorn reads a single one."""
    fields = (value for name, value in headers if name == "CONNECTION")
    return any(option.strip().lower() == "close" for value in fields for option in value.split(","))


def settle(environ: Mapping[str, Any]) -> None:
    """``RequestBody.settle`` of the request of ``environ``, where it came over a connection of ours."""
    body = environ.get("wsgi.input")
    if isinstance(body, RequestBody):
        body.settle()


def came_to_probes(environ: Mapping[str, Any]) -> bool:
    """Whether the request of ``environ`` came to the listener for probes."""
    body = environ.get("wsgi.input")
    return isinstance(body, RequestBody) and body.connection.probes


def address_in(environ: Mapping[str, Any]) -> str:
    """What the request of ``environ`` counts under without a key: what its connection does."""
    body = environ.get("wsgi.input")
    return body.connection.address if isinstance(body, RequestBody) else environ.get("REMOTE_ADDR") or ""
