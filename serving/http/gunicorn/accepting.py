"""Takes a worker's connections: in its turn, where there is a place, each in a greenlet of its own."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

from gevent.pool import Group
from gevent.server import StreamServer

from ... import logs
from .accept_balancing import Share
from .connection_limits import Places, address_of
from .keep_alive import linger
from .slowloris import Arrivals
from .write_backpressure import bound

TURN = 0.002  # seconds until a worker looks again whether a connection that others should take is its own
FULL = 0.02
FAILED = 0.1
LEAVING = 64  # connections without a place that are told so at once; others are closed
REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: text/plain\r\n"
    b"X-Content-Type-Options: nosniff\r\nContent-Length: 38\r\n\r\ntoo many connections from this address"
)


class Acceptor(StreamServer):
    """``serve(connection)`` is called in a greenlet of ``greenlets``, with the connection's place held. ``share`` None:
    whoever is first takes a connection. ``secure``: nothing is said before TLS is up."""

    max_accept = 1

    def __init__(
        self,
        listener: Any,
        serve: Callable[[Arrivals], None],
        *,
        places: Places,
        share: Share | None,
        make: Callable[[Any, Any, str], Arrivals],
        io_timeout: float,
        secure: bool = False,
    ) -> None:
        super().__init__(listener, handle=serve)
        self.greenlets, self._leaving = Group(), Group()
        self._serve, self._make = serve, make
        self._places, self._share = places, share
        self._io_timeout, self._secure = io_timeout, secure

    def do_read(self) -> Any:
        if self._places.is_full:
            return self._later(FULL)
        if self._share is not None and not self._share.is_due():
            return self._later(TURN)
        try:
            return super().do_read()
        except ConnectionError:  # gone while it waited
            return None
        except OSError as error:  # no file descriptors, most of all
            logs.event("no connection could be accepted", level=40, error=error.strerror)
            return self._later(FAILED)

    def _later(self, seconds: float) -> None:
        self.stop_accepting()
        self._timer = self.loop.timer(seconds)
        self._timer.start(self._start_accepting_if_started)

    def do_handle(self, client: Any, peer: Any) -> None:
        bound(client, self._io_timeout)
        address = address_of(peer) if isinstance(peer, tuple) else user_of(client)
        connection = self._make(client, peer, address)
        if not self._places.enter(connection):
            self._refuse(client, connection.address)
            return
        if self._share is not None:
            self._share.add()
        self.greenlets.spawn(self._held, connection)

    def _held(self, connection: Arrivals) -> None:
        try:
            self._serve(connection)
        finally:
            self._places.leave(connection)
            connection.close()

    def _refuse(self, client: Any, address: str) -> None:
        logs.event("refused", level=30, address=address, status=429, error="too many connections from this address")
        if self._secure or len(self._leaving) >= LEAVING:
            client.close()
        else:
            self._leaving.spawn(_tell, client)


def _tell(client: Any) -> None:
    with contextlib.closing(client), contextlib.suppress(OSError):
        client.settimeout(FULL)
        client.send(REFUSED)
        linger(client)


def user_of(client: Any) -> str:
    """Whose process is at the other end of a Unix socket."""
    try:
        told = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except (AttributeError, OSError):
        return "unix"
    return f"user {struct.unpack('3i', told)[1]}"
