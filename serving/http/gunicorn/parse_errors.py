"""Requests that are refused before there is a request: what the HTTP parser cannot read or will not take."""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import Any

from gunicorn.http import Request
from gunicorn.http import errors as http

from ... import logs
from ...dialects import dialect_of
from ...errors import RequestError
from ...observability.access_record import REQUEST_ID, request_id_from
from ..routes import one_slash
from .slowloris import TooSlow

REFUSED: tuple[tuple[type[Exception], int, str], ...] = (
    (TooSlow, 408, "Request Timeout"),
    (http.LimitRequestHeaders, 431, "Request Header Fields Too Large"),
    (http.LimitRequestLine, 414, "URI Too Long"),
    (http.ExpectationFailed, 417, "Expectation Failed"),
    (http.ForbiddenProxyRequest, 403, "Forbidden"),
    (http.ParseException, 400, "Bad Request"),
)


def refuse(client: Any, error: BaseException, address: str = "") -> bool:
    """Answer on the socket ``client`` where ``error`` is the request's fault; whether it is.

    In the dialect of the path and under the caller's id, as far as the parser came to know them.
    """
    for kind, status, reason in REFUSED:
        if isinstance(error, kind):
            path, request_id = _read(error)
            told = RequestError(f"{reason}: {str(error)[:200]}")
            answer = dialect_of(one_slash(path)).error(told)
            head = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: {answer.content_type}\r\n"
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
                status=status,
                error=told.message,
            )
            return True
    return False


def _read(error: BaseException) -> tuple[str, str]:
    """Path and id of the request that ``error`` ended. Only the frames that it went through still have that."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for found in (frame.f_locals.get("self"), frame.f_locals.get("request")):
            if isinstance(found, Request):
                return found.path or "", request_id_from(dict(found.headers).get(REQUEST_ID.upper()))
    return "", request_id_from(None)
