"""Accept a worker's connections: in turn (accept balancing), within the connection limits, with one greenlet each."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

from gevent.pool import Group
from gevent.server import StreamServer

from ...interface.errors import LimitExceeded
from ...system import logs
from .accept_balancing import WorkerSlot
from .connection_limits import ConnectionLimits, address_of
from .lingering_close import linger
from .slowloris import TimedConnection
from .write_backpressure import limit_unsent

CHECK_SECONDS = 0.002  # seconds until a worker checks again whether it is its turn
FULL_SECONDS = 0.02  # seconds until a full worker checks again for a free place
FAILED_SECONDS = 0.1  # seconds until a worker tries again to accept after an error
MAX_REFUSING = 64  # connections over the limits that get a response at the same time; others are closed
REFUSAL = "too many connections from this address"
REFUSED = (
    f"HTTP/1.1 {LimitExceeded.status} Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\n"
    "Content-Type: text/plain\r\nX-Content-Type-Options: nosniff\r\n"
    f"Content-Length: {len(REFUSAL)}\r\n\r\n{REFUSAL}"
).encode()


class Acceptor(StreamServer):
    """An acceptor that calls ``serve(connection)`` in a greenlet of ``greenlets``, with the connection counted in
    ``limits``.

    With a ``slot`` of None there is no balancing: the first worker that wakes takes a connection. If ``secure``, a
    refused connection is closed without a response, because TLS is not established yet.
    """

    max_accept = 1

    def __init__(
        self,
        listener: Any,
        serve: Callable[[TimedConnection], None],
        *,
        limits: ConnectionLimits,
        slot: WorkerSlot | None,
        make: Callable[[Any, Any, str], TimedConnection],
        io_timeout: float,
        secure: bool = False,
    ) -> None:
        super().__init__(listener, handle=serve)
        self.greenlets, self._refusing = Group(), Group()
        self._serve, self._make = serve, make
        self._limits, self._slot = limits, slot
        self._io_timeout, self._secure = io_timeout, secure

    def do_read(self) -> Any:
        if self._limits.is_full:
            return self._later(FULL_SECONDS)
        if self._slot is not None and not self._slot.take_turn():
            return self._later(CHECK_SECONDS)
        try:
            return super().do_read()
        except ConnectionError:  # the client went away while the connection waited
            return None
        except OSError as error:  # most often: no file descriptors left
            logs.event("no connection could be accepted", level=40, error=error.strerror)
            return self._later(FAILED_SECONDS)

    def _later(self, seconds: float) -> None:
        self.stop_accepting()
        self._timer = self.loop.timer(seconds)
        self._timer.start(self._start_accepting_if_started)

    def do_handle(self, client: Any, peer: Any) -> None:
        limit_unsent(client, self._io_timeout)
        address = address_of(peer) if isinstance(peer, tuple) else user_of(client)
        connection = self._make(client, peer, address)
        if not self._limits.admit(connection):
            self._refuse(client, connection.address)
            return
        if self._slot is not None:
            self._slot.add()
        self.greenlets.spawn(self._held, connection)

    def _held(self, connection: TimedConnection) -> None:
        try:
            self._serve(connection)
        finally:
            self._limits.release(connection)
            connection.close()

    def _refuse(self, client: Any, address: str) -> None:
        logs.event("refused", level=30, address=address, status=LimitExceeded.status, error=REFUSAL)
        if self._secure or len(self._refusing) >= MAX_REFUSING:
            client.close()
        else:
            self._refusing.spawn(_send_refusal, client)


def _send_refusal(client: Any) -> None:
    with contextlib.closing(client), contextlib.suppress(OSError):
        client.settimeout(FULL_SECONDS)
        client.send(REFUSED)
        linger(client)


def user_of(client: Any) -> str:
    """Return the user at the other end of a Unix socket (``SO_PEERCRED``)."""
    try:
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except (AttributeError, OSError):
        return "unix"
    return f"user {struct.unpack('3i', credentials)[1]}"
