"""Requests that are refused before there is a request: what the HTTP parser cannot read or will not take."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from gunicorn.http import errors as http

from ..dialects import DIALECTS
from ..errors import RequestError

REFUSED: tuple[tuple[type[Exception], int, str], ...] = (
    (http.LimitRequestHeaders, 431, "Request Header Fields Too Large"),
    (http.LimitRequestLine, 414, "URI Too Long"),
    (http.ExpectationFailed, 417, "Expectation Failed"),
    (http.ForbiddenProxyRequest, 403, "Forbidden"),
    (http.ParseException, 400, "Bad Request"),
)


def refuse(client: Any, error: BaseException) -> bool:
    """Answer on the socket ``client`` where ``error`` is the request's fault; whether it is."""
    for kind, status, reason in REFUSED:
        if isinstance(error, kind):
            body = json.dumps(DIALECTS["mlflow"].error(RequestError(f"{reason}: {str(error)[:200]}")).body)
            head = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            with contextlib.suppress(OSError):
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii"))
            return True
    return False
