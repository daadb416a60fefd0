"""Request smuggling: refuse a request that two HTTP parsers could read differently.

gunicorn's parser is lenient in a few cases in which a proxy in front of it may not be. ``check`` refuses these cases in
the head, ``StrictChunks`` those in a chunked body.
"""

from __future__ import annotations

import re
from typing import Any

from gunicorn.http.body import Body, ChunkedReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.util import split_request_uri

# A name, an IPv4 address or an IPv6 address in brackets, and an optional port (RFC 9110, 7.2). No client uses any other
# form.
HOST = re.compile(r"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
NOT_IN_A_TARGET = re.compile(r"[\x00-\x20#\x7f]|%(?:00|[^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)", re.DOTALL)
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
MAX_CHUNK_LINE = 4 * 2**10  # bytes of a chunk's size and its extensions, which are ignored
MAX_TRAILERS = 16 * 2**10


class AmbiguousRequest(ParseException):
    """A request that another HTTP parser could read differently."""


def check(request: Any) -> None:
    """Raise ``AmbiguousRequest`` for a head, parsed by gunicorn, that is ambiguous."""
    if NOT_IN_A_TARGET.search(request.uri):
        raise AmbiguousRequest("the request's target has a NUL, a control character, a # or a % that escapes nothing")
    names = [name for name, _ in request.headers]
    headers = dict(request.headers)
    coding = headers.get("TRANSFER-ENCODING")
    if coding is not None and (coding.lower() != "chunked" or names.count("TRANSFER-ENCODING") > 1):
        raise AmbiguousRequest("Transfer-Encoding: only chunked is supported")
    _check_host(request, headers.get("HOST"))


def _check_host(request: Any, host: str | None) -> None:
    if host is None:
        if request.version >= (1, 1):
            raise AmbiguousRequest("Host: is missing")
        return
    if not HOST.fullmatch(host):
        raise AmbiguousRequest("Host: a name or an address, and a port, is expected")
    if request.uri.startswith("/") or request.uri == "*":
        return
    # the absolute form, used for proxies: its authority takes precedence over Host, so the two must be equal
    if split_request_uri(request.uri).netloc.lower() != host.lower():
        raise AmbiguousRequest("Host: is not that of the request's target")


def strict(request: Any) -> None:
    """Make a chunked body of ``request`` be read by ``StrictChunks``. Call it before any of the body is read."""
    if isinstance(request.body.reader, ChunkedReader):
        request.body = Body(StrictChunks(request, request.unreader))


class StrictChunks(ChunkedReader):
    """A reader of sizes, extensions and trailers strictly by RFC 9112, 7.1, and with a limited length."""

    def parse_chunk_size(self, unreader: Any, data: bytes | None = None) -> tuple[int, bytes | None]:
        line, rest = self._line(unreader, data or b"")
        found = CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise AmbiguousRequest("a chunk's size or extension is malformed")
        size = int(found[1], 16)
        if size == 0:
            self.parse_trailers(unreader, rest)
            return 0, None
        return size, rest

    def parse_trailers(self, unreader: Any, data: bytes) -> None:
        """Parse what follows the last chunk, up to an empty line, like headers, and discard it."""
        while not data.startswith(b"\r\n") and b"\r\n\r\n" not in data:
            if len(data) > MAX_TRAILERS:
                raise AmbiguousRequest("the trailers are too long")
            data += self._more(unreader)
        super().parse_trailers(unreader, data)

    def _line(self, unreader: Any, data: bytes) -> tuple[bytes, bytes]:
        while b"\r\n" not in data:
            if len(data) > MAX_CHUNK_LINE:
                raise AmbiguousRequest("a chunk's extension is too long")
            data += self._more(unreader)
        line, _, rest = data.partition(b"\r\n")
        return line, rest

    def _more(self, unreader: Any) -> bytes:
        data: bytes = unreader.read()
        if not data:
            raise NoMoreData()
        return data
