"""Requests as bytes on a socket."""

from __future__ import annotations

import json
import re
import socket

from server_calls import BODY
from serving_process import Running

GOOD = json.dumps(BODY).encode()
NEXT = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAT = b"/v1/chat/completions"


def post(headers: bytes, body: bytes = b"", path: bytes = CHAT) -> bytes:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + headers + b"\r\n" + body


def chunked(body: bytes, path: bytes = CHAT) -> bytes:
    return post(b"Transfer-Encoding: chunked\r\n", body, path)


def sized(body: bytes, path: bytes = CHAT, more: bytes = b"") -> bytes:
    return post(b"Content-Length: %d\r\n" % len(body) + more, body, path)


def exchange(server: Running, data: bytes, *, end: bool = False) -> tuple[list[int], bytes]:
    """Send ``data`` and return the statuses of all answers and everything received until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as caller:
        caller.sendall(data)
        if end:
            caller.shutdown(socket.SHUT_WR)
        answer = b""
        while part := caller.recv(65536):
            answer += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)], answer
