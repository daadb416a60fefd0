"""Read a request's body, complete and within its size limit, from the WSGI stream.

The framework's own reader would return the beginning of a chunked body over the limit as if it were the whole body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gevent
from gunicorn.http.errors import ParseException

from ...frontend.limits.memory_budget import Allocation
from ...interface.errors import PayloadTooLarge, RequestError, RequestTimeout
from .request_smuggling import AmbiguousRequest

READ_CHUNK_BYTES = (
    64 * 2**10
)  # bytes read before other greenlets may run: megabytes already received would block them all


class TooSlow(ParseException):
    """A head or a body did not arrive in time. Not a ``TimeoutError``, after which gunicorn would continue reading."""


def is_large(environ: Mapping[str, Any], size: int) -> bool:
    """Return whether the body may have ``size`` bytes or more: its announced length says so or is missing."""
    announced = environ.get("CONTENT_LENGTH")
    return not (announced and announced.isdecimal() and len(announced) < 20 and int(announced) < size)


def read_body(environ: Mapping[str, Any], limit: int, allocation: Allocation | None = None) -> bytes:
    """Read the body of a request, at most ``limit`` bytes; ``allocation`` counts the bytes as they arrive.

    Raises ``PayloadTooLarge``, for an announced length before anything is read; ``RequestError`` for a body that is
    encoded or malformed; and ``RequestTimeout`` for one that arrives too slowly.
    """
    encoding = environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(f"Content-Encoding: {encoding[:40]!r} is not supported; send the body uncompressed")
    length = _length(environ, limit)
    try:
        if length is not None:
            if allocation is not None:
                allocation.check(length)
            return _exactly(environ["wsgi.input"], length, allocation)
        return _all(environ["wsgi.input"], limit, allocation) if environ.get("wsgi.input_terminated") else b""
    except TooSlow as error:
        raise RequestTimeout(str(error)) from None
    except AmbiguousRequest as error:
        raise RequestError(f"the body cannot be read: {error}") from None
    except (OSError, ValueError, ParseException) as error:  # what WSGI servers raise for malformed chunks and trailers
        raise RequestError(f"the body cannot be read: {type(error).__name__}") from None


def _length(environ: Mapping[str, Any], limit: int) -> int | None:
    """Return the announced number of bytes, or None for a chunked body."""
    announced = environ.get("CONTENT_LENGTH")
    if environ.get("HTTP_TRANSFER_ENCODING") or not announced:
        return None
    if not announced.isdecimal():
        raise RequestError(f"Content-Length: {announced[:40]!r} is not a number of bytes")
    length = int(announced) if len(announced) < 20 else limit + 1
    if length > limit:
        raise PayloadTooLarge(f"the body has {announced[:20]} bytes; at most {limit} are allowed")
    return length


def _exactly(stream: Any, length: int, allocation: Allocation | None) -> bytes:
    pieces, left = [], length
    while left:
        piece = stream.read(min(left, READ_CHUNK_BYTES))
        if not piece:
            raise RequestError(f"the body ended after {length - left} of {length} bytes")
        if allocation is not None:
            allocation.grow(len(piece))
        pieces.append(piece)
        left -= len(piece)
        if left:
            gevent.sleep(0)
    return b"".join(pieces)


def _all(stream: Any, limit: int, allocation: Allocation | None) -> bytes:
    pieces, size = [], 0
    while piece := stream.read(READ_CHUNK_BYTES):
        size += len(piece)
        if allocation is not None:
            allocation.grow(len(piece))
        if size > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes, which is the maximum")
        pieces.append(piece)
        if len(piece) == READ_CHUNK_BYTES:
            gevent.sleep(0)
    return b"".join(pieces)
