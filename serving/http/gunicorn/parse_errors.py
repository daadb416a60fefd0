"""Error responses to input that the HTTP parser cannot read, does not accept, or receives too slowly."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from gunicorn.http import Request, RequestParser
from gunicorn.http import errors as http

from ...dialects import dialect_of
from ...interface.errors import ExpectationFailed, HeadersTooLarge, RequestError, RequestTimeout, UriTooLong
from ...observability.access_record import REQUEST_ID, request_id_from
from ...system import logs
from ..routes import one_slash
from ..wire.bodies import TooSlow

REFUSED: tuple[tuple[type[Exception], type[RequestError], str], ...] = (
    (TooSlow, RequestTimeout, "Request Timeout"),
    (http.LimitRequestHeaders, HeadersTooLarge, "Request Header Fields Too Large"),
    (http.LimitRequestLine, UriTooLong, "URI Too Long"),
    (http.ExpectationFailed, ExpectationFailed, "Expectation Failed"),
    (http.ParseException, RequestError, "Bad Request"),
)


SPEAKS_TLS = (
    "the client speaks TLS (https://), and this server plain HTTP: use http://, or start the server with --tls-cert"
)
TLS_HANDSHAKE = b"\x16\x03"  # a record of type handshake, of SSL 3.0 to TLS 1.3


class SpeaksTls(http.ParseException):
    """The client has begun a TLS handshake on a connection that is plain HTTP."""

    def __str__(self) -> str:
        return SPEAKS_TLS


class NotedRequest(Request):
    """gunicorn's parser of a request head, set as ``connection.request`` before it starts: if parsing fails,
    ``connection.request`` has what was parsed so far."""

    def __init__(self, cfg: Any, unreader: Any, peer_addr: Any, req_number: int = 1) -> None:
        unreader.sock.request = self
        super().__init__(cfg, unreader, peer_addr, req_number)

    def read_into(self, unreader: Any, buf: bytearray, stop: bool = False) -> None:
        """Read more of the head. Raises ``SpeaksTls``: that client would wait for ever."""
        super().read_into(unreader, buf, stop=stop)
        if buf.startswith(TLS_HANDSHAKE):
            raise SpeaksTls


def install() -> None:
    """Make gunicorn parse with ``NotedRequest`` in this process; it has no setting for that."""
    RequestParser.mesg_class = NotedRequest


def refuse(client: Any, error: BaseException, address: str = "", request: Request | None = None) -> bool:
    """Send an error response on the socket ``client`` if ``error`` is the request's fault. Return whether it is.

    The response uses the path's dialect and the client's request id, if the parser has read them into ``request``.
    """
    found = next(((cls, reason) for kind, cls, reason in REFUSED if isinstance(error, kind)), None)
    if found is None:
        return False
    cls, reason = found
    path = (request.path or "") if request is not None else ""
    request_id = request_id_from(dict(request.headers).get(REQUEST_ID.upper()) if request is not None else None)
    refusal = cls(f"{reason}: {str(error)[:200]}")
    answer = dialect_of(one_slash(path)).error(refusal)
    head = f"HTTP/1.1 {refusal.status} {reason}\r\nConnection: close\r\nContent-Type: {answer.content_type}\r\n"
    head += "X-Content-Type-Options: nosniff\r\n"
    head += f"{REQUEST_ID}: {request_id}\r\nContent-Length: {len(answer.body)}\r\n\r\n"
    with contextlib.suppress(OSError):
        client.sendall(head.encode("ascii") + answer.body)
    logs.event(
        "refused",
        level=logging.WARNING,
        request_id=request_id,
        address=address,
        path=path or None,
        status=refusal.status,
        error=refusal.message,
    )
    return True
