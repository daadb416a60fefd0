"""Write back-pressure for slow readers: a low watermark of unsent bytes, and a timeout that progress renews.

By itself the kernel buffers megabytes for a client that reads nothing: replies of thousands of tokens would be
generated to their ends unread. With ``TCP_NOTSENT_LOWAT`` a write blocks instead, and the engine pauses with it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

UNSENT = 16 * 2**10  # the watermark: bytes that the peer's window does not let out yet
PIECE = 64 * 2**10
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux; named since Python 3.12
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


def limit_unsent(plain: Any, io_timeout: float) -> None:
    """Let the kernel keep ``UNSENT`` bytes at most that the peer has no room for, and give the connection up where it
    takes none for ``io_timeout`` seconds, also when we have closed it. What is on its way is not bounded: that would
    slow down readers that are far away."""
    with contextlib.suppress(OSError):  # systems without these options
        if plain.family == socket.AF_UNIX:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
            return
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT)
        plain.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, min(max(1, int(io_timeout * 1000)), 2**31 - 1))


class BackpressureSocket:
    """A client's socket for gunicorn's answers, which go out by ``send``.

    ``sendall`` raises ``TimeoutError`` where the client takes nothing for the socket's timeout, and not where it takes
    long in all, as that of the socket itself would.

    Once gunicorn has sent an answer's head, parts of its body may also be appended, framed as gunicorn does; they go
    out by ``send_pending``, which never waits, or with the next ``sendall``. ``send_now`` is ``send`` that returns what
    it could send, None where there is no such; ``chunked``: the client speaks HTTP/1.1 or newer.
    """

    __slots__ = ("_chunked", "_pending", "_plain", "_send", "_send_now")

    def __init__(
        self,
        plain: Any,
        send: Callable[[Any], int],
        send_now: Callable[[bytes], int] | None = None,
        *,
        chunked: bool = True,
    ) -> None:
        self._plain, self._send, self._send_now, self._chunked = plain, send, send_now, chunked
        self._pending = b""

    def sendall(self, data: Any) -> None:
        if self._pending:
            data, self._pending = self._pending + data, b""
        left = memoryview(data)
        while left:
            left = left[self._send(left[:PIECE]) :]

    @property
    def sends_now(self) -> bool:
        """Whether there is ``send_pending``."""
        return self._send_now is not None

    def append(self, data: bytes) -> None:
        self._pending += b"%X\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def send_pending(self) -> bool:
        """Send of what was appended as much as goes out at once; whether that was all."""
        assert self._send_now is not None
        if self._pending:
            self._pending = self._pending[self._send_now(self._pending) :]
        return not self._pending

    def flush(self) -> None:
        """Send what was appended; waits, and raises, as ``sendall`` does."""
        self.sendall(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
