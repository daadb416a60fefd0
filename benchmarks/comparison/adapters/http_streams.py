"""Streams of a server on this machine, read by one thread, so that the client takes little CPU time beside it."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comparison.drive import Engine, Piece

Body = Callable[[dict[str, Any]], dict[str, Any]]
Reader = Callable[[dict[str, Any]], tuple[list[int], str]]


@dataclass
class Stream:
    """The received part of an answer; ``over`` when it has ended."""

    request: dict[str, Any]
    head: bytes = b""
    data: bytes = b""
    over: bool = False

    def take(self, data: bytes) -> list[Any]:
        """Return the events that ``data``, empty at the connection's end, completes. Raises ``RuntimeError`` for an
        answer other than 200.

        Sizes of chunks stand before and between events, never within one, which a server writes whole."""
        self.data += data
        if not self.head:
            if b"\r\n\r\n" not in self.data:
                if not data:
                    raise RuntimeError("the connection was closed before an answer")
                return []
            self.head, _, self.data = self.data.partition(b"\r\n\r\n")
            if b" 200 " not in self.head.split(b"\r\n")[0]:
                raise RuntimeError(f"{self.head[:80]!r} {self.data[:300]!r}")
        *events, self.data = self.data.split(b"\n\n")
        self.over = not data or self.data.endswith(b"\n0\r\n\r\n") or self.data == b"0\r\n\r\n"
        told = (event.partition(b"data: ")[2] for event in events)
        return [json.loads(event) for event in told if event and not event.startswith(b"[DONE]")]


class HttpStreams(Engine):
    """An engine over HTTP: ``body`` makes a request's body; ``read`` takes tokens and text from a streamed event.

    A connection each: servers close kept ones as they like. ``end`` ends the server."""

    servers = True

    def __init__(
        self, port: int, path: str, body: Body, read: Reader, told: dict[str, str], end: Callable[[], Any]
    ) -> None:
        self.versions, self._end = told, end
        self._port, self._path, self._body, self._read = port, path, body, read
        self._selector = selectors.DefaultSelector()

    def add(self, request: dict[str, Any]) -> None:
        payload = json.dumps(self._body(request)).encode()
        lines = (f"POST {self._path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(payload)}")
        head = "\r\n".join((*lines, "Content-Type: application/json", "Connection: close", "", ""))
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(head.encode() + payload)
        self._selector.register(connection, selectors.EVENT_READ, Stream(request))

    def close(self) -> None:
        self._end()

    def step(self, wait: float) -> list[Piece]:
        pieces = []
        for key, _ in self._selector.select(wait):
            connection: Any = key.fileobj
            stream: Stream = key.data
            data = connection.recv(1 << 16)
            for event in stream.take(data):
                tokens, text = self._read(event)
                if tokens or text:
                    pieces.append(Piece(stream.request["id"], tokens, text, False))
            if stream.over:
                self._selector.unregister(connection)
                connection.close()
                pieces.append(Piece(stream.request["id"], [], "", True))
        return pieces
