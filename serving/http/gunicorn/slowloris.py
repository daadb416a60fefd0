"""Slowloris protection: deadlines for head and body, which gunicorn's parser reads through ``TimedConnection``.

A socket's own timeout is for each byte: a client that sends one now and then (Slowloris) would hold its connection for
as long as it likes, before it is asked for a key.
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

from ..bodies import TooSlow

RATE = 2**10  # bytes that pay for a second: the slowest of honest uploads and downloads are faster
STALLED = 1.0  # seconds that a reader may lag ``RATE`` before its connection counts as waiting for it
HANDSHAKE = b"\x16"  # TLS' content type, the first byte of its first record
MOMENT = 0.001  # seconds: what is there already is taken, however late


class PlainHttp(ParseException):
    """The first bytes are no TLS record, on a listener that speaks TLS."""


class TimedConnection:
    """A client's connection as gunicorn's parser reads it, with deadlines; ``plain`` is the socket itself.

    ``io_timeout`` (seconds) is what a client may be waited for: for the first byte of a head (that of the first one
    within ``first_timeout``), after which the connection ends without a word (``TimeoutError``); then for all of the
    rest of the head; then for a body, where ``RATE`` bytes give a second back (``TooSlow``). Only waiting counts, so a
    busy server costs no client its time, and no timer has to be stopped while a request is answered.

    An answer goes out by ``send``, which notes how far its reader lags ``RATE``: to take next to nothing of it
    (Slow Read) holds a connection as cheaply as to send next to nothing of a request.

    ``peer`` is the socket's address, ``address`` whom it counts for (``connection_limits``). ``probes``: it came to
    the listener for probes.
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
        self.request: Any = None  # the one whose head came last, as far as it is parsed
        self._limit = io_timeout
        self._left = min(io_timeout, first_timeout or io_timeout)
        self._part: Literal["", "head", "body"] = ""
        self._began = monotonic()
        self._waits_for: Literal["", "request", "answer"] = ""
        self._lag = 0.0  # seconds that the reader of answers lags ``RATE``, as of ``_sent_at``
        self._sent_at = 0.0

    def expect_head(self) -> None:
        self._expect("")

    def expect_body(self) -> None:
        self._expect("body")

    def _expect(self, part: Literal["", "head", "body"]) -> None:
        self._part, self._left, self._began = part, self._limit, monotonic()

    def start_tls(self, context: Any) -> None:
        """Raises ``OSError``, also for a handshake that takes longer than a first byte may, ``PlainHttp``."""
        with self._waiting("request"), gevent.Timeout(self._left, TimeoutError("the TLS handshake did not come")):
            if self.plain.recv(1, socket.MSG_PEEK) not in (HANDSHAKE, b""):
                raise PlainHttp("this server speaks https")
            self.plain = context.wrap_socket(self.plain, server_side=True, do_handshake_on_connect=False)
            self.plain.do_handshake()
        self.is_secure = True
        self.plain.settimeout(self._limit)

    def recv(self, size: int) -> bytes:
        self.plain.settimeout(max(self._left, MOMENT))
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
            self._expect("head")  # whose time begins with its first byte
        elif self._part == "head":
            self._left -= waited
        else:
            self._left = min(self._left - waited + size / RATE, self._limit)

    def send(self, data: Any) -> int:
        """As the socket's; raises ``TimeoutError`` where the client takes nothing for the socket's timeout."""
        self._sent_at = monotonic()
        with self._waiting("answer"):
            sent: int = self.plain.send(data)
        self._lag = max(0.0, self._lag + monotonic() - self._sent_at - sent / RATE)
        return sent

    def send_now(self, data: bytes) -> int:
        """As ``send`` of a socket without TLS, but for waiting: 0 where the kernel takes nothing, and where the
        connection has broken, which ``send`` will find."""
        try:
            sent: int = self.plain.send(data, 0, 0.0)
        except OSError:
            return 0
        if self._lag:
            self._lag = max(0.0, self._lag - sent / RATE)
        return sent

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """For what is done only so that the client sees the end of its answer: it may be evicted."""
        self.expect_head()
        with self._waiting("request"):
            yield

    def _too_slow(self) -> TooSlow:
        if self._part == "head":
            return TooSlow(f"the head did not arrive within {self._limit:g} seconds")
        return TooSlow(f"the body arrives too slowly: more than {self._limit:g} seconds behind {RATE} bytes a second")

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
        return (2, since) if self._waits_for == "answer" and monotonic() - since >= STALLED else None

    def evict(self) -> None:
        """End the connection under the greenlet that waits for it, which finds it closed by its client."""
        with contextlib.suppress(OSError):  # a twin, for a TLS socket would forget its state
            twin = socket.socket(fileno=os.dup(self.plain.fileno()))
            with contextlib.closing(twin):
                twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.plain.close()
