"""Slowloris protection: deadlines for head and body, which gunicorn's parser reads through ``TimedConnection``.

A socket's own timeout applies to each ``recv``: a client that sends a byte now and then (Slowloris) could hold its
connection as long as it likes, before any API key is checked.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any, Literal

import gevent
from gunicorn.http.errors import ParseException

from ..wire.bodies import TooSlow

MIN_BYTES_PER_SECOND = 2**10  # bytes per second: the slowest honest uploads and downloads are faster
# Seconds that a reader may lag behind ``MIN_BYTES_PER_SECOND`` before its connection counts as waiting for the reader.
STALLED_SECONDS = 1.0
HANDSHAKE = b"\x16"  # the TLS content type of a handshake, the first byte of the first record
MOMENT_SECONDS = 0.001  # seconds: the shortest timeout, so that data which is already there is read, however late


class PlainHttp(ParseException):
    """A listener that speaks TLS received first bytes that are not a TLS record."""


class TimedConnection:
    """A client's connection with deadlines, as gunicorn's parser reads it; ``plain`` is the socket itself.

    ``io_timeout`` (seconds) limits how long the server waits for the client. It applies to the first byte of a head
    (of the connection's first head: ``first_timeout``, if that is shorter), after which the connection ends without a
    response (``TimeoutError``); then to the whole rest of the head; then to a body, where every
    ``MIN_BYTES_PER_SECOND`` bytes give one second back (``TooSlow``). Only waiting counts, so a busy server does not
    use up a client's time, and no timer has to be stopped while a request is answered.

    A response goes out by ``send``, which tracks how far its reader lags behind ``MIN_BYTES_PER_SECOND``: reading
    almost nothing of a response (Slow Read) holds a connection as cheaply as sending almost nothing of a request.

    ``peer`` is the socket's address; ``address`` is what the connection is counted under (``connection_limits``).
    ``probes`` says that it came to the listener for probes.
    """

    __slots__ = (
        "_began", "_lag", "_left", "_limit", "_part", "_sent_at", "_waits_for", "address", "is_secure", "peer", "plain",
        "probes", "request",
    )  # fmt: skip

    def __init__(
        self,
        plain: Any,
        io_timeout: float,
        *,
        first_timeout: float | None = None,
        peer: Any = "",
        address: str = "",
        probes: bool = False,
    ) -> None:
        self.plain = plain
        self.peer, self.address, self.probes = peer, address, probes
        self.is_secure = False
        self.request: Any = None  # the request whose head came last, as far as it is parsed
        self._limit = io_timeout
        self._left = min(io_timeout, first_timeout or io_timeout)
        self._part: Literal["", "head", "body"] = ""
        self._began = monotonic()
        self._waits_for: Literal["", "request", "answer"] = ""
        self._lag = (
            0.0  # seconds by which the reader of responses lagged behind ``MIN_BYTES_PER_SECOND`` at ``_sent_at``
        )
        self._sent_at = 0.0

    def expect_head(self) -> None:
        self._expect("")

    def expect_body(self) -> None:
        self._expect("body")

    def _expect(self, part: Literal["", "head", "body"]) -> None:
        self._part, self._left, self._began = part, self._limit, monotonic()

    def start_tls(self, context: Any) -> None:
        """Do the TLS handshake.

        Raises ``OSError``, also if it takes longer than a first byte may take, and ``PlainHttp``.
        """
        with self._waiting("request"), gevent.Timeout(self._left, TimeoutError("the TLS handshake did not arrive")):
            if self.plain.recv(1, socket.MSG_PEEK) not in (HANDSHAKE, b""):
                raise PlainHttp("this server speaks https")
            self.plain = context.wrap_socket(self.plain, server_side=True, do_handshake_on_connect=False)
            self.plain.do_handshake()
        self.is_secure = True
        self.plain.settimeout(self._limit)

    def recv(self, size: int) -> bytes:
        self.plain.settimeout(max(self._left, MOMENT_SECONDS))
        began = monotonic()
        try:
            with self._waiting("request"):
                data: bytes = self.plain.recv(size)
        except TimeoutError:
            if not self._part:
                raise
            raise self._too_slow() from None
        finally:
            self.plain.settimeout(self._limit)
        self._count(len(data), monotonic() - began)
        return data

    def _count(self, size: int, waited: float) -> None:
        if not self._part:
            self._expect("head")  # the head's time starts with its first byte
        elif self._part == "head":
            self._left -= waited
        else:
            self._left = min(self._left - waited + size / MIN_BYTES_PER_SECOND, self._limit)

    def send(self, data: Any) -> int:
        """Send as the socket does; raises ``TimeoutError`` if the client reads nothing for the socket's timeout."""
        self._sent_at = monotonic()
        with self._waiting("answer"):
            sent: int = self.plain.send(data)
        self._lag = max(0.0, self._lag + monotonic() - self._sent_at - sent / MIN_BYTES_PER_SECOND)
        return sent

    def send_now(self, data: bytes) -> int:
        """Send without waiting, on a socket without TLS. Return the number of bytes sent.

        It is 0 if the kernel accepts nothing, and if the connection is broken; the next ``send`` reports that.
        """
        try:
            sent: int = self.plain.send(data, 0, 0.0)
        except OSError:
            return 0
        if self._lag:
            self._lag = max(0.0, self._lag - sent / MIN_BYTES_PER_SECOND)
        return sent

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Mark the connection as evictable while it stays open only so that the client sees the end of its response."""
        self.expect_head()
        with self._waiting("request"):
            yield

    def _too_slow(self) -> TooSlow:
        if self._part == "head":
            return TooSlow(f"the head did not arrive within {self._limit:g} seconds")
        return TooSlow(
            f"the body arrives too slowly: more than {self._limit:g} seconds behind"
            f" {MIN_BYTES_PER_SECOND} bytes a second"
        )

    @contextlib.contextmanager
    def _waiting(self, what: Literal["request", "answer"]) -> Iterator[None]:
        self._waits_for = what
        try:
            yield
        finally:
            self._waits_for = ""

    @property
    def waiting_since(self) -> tuple[int, float] | None:
        """See ``connection_limits.Limited``."""
        if self._waits_for == "request":
            return int(self._part == "body"), self._began
        since = self._sent_at - self._lag
        return (2, since) if self._waits_for == "answer" and monotonic() - since >= STALLED_SECONDS else None

    def evict(self) -> None:
        """End the connection. The greenlet that waits for it sees it as closed by the client."""
        with contextlib.suppress(OSError):  # on a duplicate, because ``shutdown`` would drop a TLS socket's state
            twin = socket.socket(fileno=os.dup(self.plain.fileno()))
            with contextlib.closing(twin):
                twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.plain.close()
