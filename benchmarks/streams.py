"""Many concurrent HTTP requests from one thread, at a few microseconds an event, so that the client is no
bottleneck."""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """A request; times are seconds on the performance counter, ``chunks`` the times of its streamed events."""

    request: bytes
    connection: socket.socket
    started: float = 0.0
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    data: bytes = b""
    seen: int = 0

    def take(self, data: bytes, streamed: bool) -> bool:
        """Add received data and return whether the answer is complete."""
        now = time.perf_counter()
        self.data += data
        if streamed:
            events = data.count(b"data: ")
            self.chunks += [now] * events
            complete = self.data.endswith(b"\r\n0\r\n\r\n")  # not the end of a header
        else:
            head, _, body = self.data.partition(b"\r\n\r\n")
            length = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), None)
            complete = length is not None and len(body) >= length
        if complete:
            self.ended = now
        return complete


def encode(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(payload)}")
    head = "\r\n".join((*lines, "Content-Type: application/json", "", ""))
    return head.encode() + payload


def closed_loop(port: int, requests: list[bytes], callers: int, *, streamed: bool) -> tuple[list[Call], float]:
    """Send all ``requests`` from ``callers`` kept connections; return the calls and the wall time. Raises
    ``RuntimeError`` for an answer other than 200."""
    left = iter(requests)
    done: list[Call] = []
    with selectors.DefaultSelector() as selector:

        def ask(connection: socket.socket) -> bool:
            request = next(left, None)
            if request is None:
                return False
            call = Call(request, connection, started=time.perf_counter())
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ, call)
            return True

        started = time.perf_counter()
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(min(callers, len(requests)))]
        running = sum(ask(connection) for connection in connections)
        while running:
            for key, _ in selector.select():
                call: Call = key.data
                data = call.connection.recv(65536)
                if not data:
                    raise RuntimeError(f"connection closed after {call.data[:200]!r}")
                if call.take(data, streamed):
                    if not call.data.startswith(b"HTTP/1.1 200"):
                        raise RuntimeError(f"{call.data[:300]!r}")
                    selector.unregister(call.connection)
                    done.append(call)
                    running += ask(call.connection) - 1
        seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return done, seconds
