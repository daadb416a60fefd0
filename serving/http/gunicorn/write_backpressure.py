"""Write back-pressure for slow readers: a low watermark of unsent bytes, and a timeout that progress renews.

By default the kernel buffers megabytes for a client that reads nothing, so replies of thousands of tokens would be
generated completely without being read. With ``TCP_NOTSENT_LOWAT`` a write blocks instead, and the engine pauses too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

UNSENT_BYTES = 16 * 2**10  # the watermark: bytes in the kernel that the peer's window does not allow to be sent yet
WRITE_CHUNK_BYTES = 64 * 2**10
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux; named since Python 3.12
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


def limit_unsent(plain: Any, io_timeout: float) -> None:
    """Limit the unsent bytes in the kernel to ``UNSENT_BYTES``; let it drop a connection whose peer takes none.

    It drops the connection after ``io_timeout`` seconds, even if we have closed it. Bytes in flight are not limited,
    because that would slow down distant readers.
    """
    with contextlib.suppress(OSError):  # systems without these options
        if plain.family == socket.AF_UNIX:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
            return
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        plain.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, min(max(1, int(io_timeout * 1000)), 2**31 - 1))


class BackpressureSocket:
    """A client's socket for gunicorn's responses, which go out by ``send``.

    ``sendall`` raises ``TimeoutError`` if the client reads nothing for the socket's timeout, but not because the whole
    call takes longer, as the socket's own ``sendall`` would.

    Once gunicorn has sent a response's head, parts of its body may also be appended, framed as gunicorn frames them.
    They go out by ``send_pending``, which never waits, or with the next ``sendall``. ``send_now`` sends without waiting
    and returns how many bytes it sent; None if the connection has no such function. ``chunked`` says that the client
    speaks HTTP/1.1 or newer.
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
            left = left[self._send(left[:WRITE_CHUNK_BYTES]) :]

    @property
    def sends_now(self) -> bool:
        """Whether ``send_pending`` can be used."""
        return self._send_now is not None

    def append(self, data: bytes) -> None:
        self._pending += b"%X\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def send_pending(self) -> bool:
        """Send as many of the appended bytes as possible without waiting. Return whether all were sent."""
        assert self._send_now is not None
        if self._pending:
            self._pending = self._pending[self._send_now(self._pending) :]
        return not self._pending

    def flush(self) -> None:
        """Send what was appended; waits and raises as ``sendall`` does."""
        self.sendall(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
