"""A connection to an engine's socket, and what its monitor says of it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..auth import secure_client


class Connection:
    """Owned by one thread; no method waits. ``fds`` can be read when there is something to look at (see ``wait``).

    ``connected`` is whether the other side has taken our key; ``secret`` is None on one host.
    """

    def __init__(self, context: Any, endpoint: str, secret: bytes | None) -> None:
        self.endpoint = endpoint
        self.connected = self._broken = False
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            if secret is not None:
                secure_client(self._socket, secret)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._socket.connect(endpoint)
        except BaseException:  # no descriptors are left: one that stayed open would keep the context from ending
            self._socket.close(0)
            raise
        self._monitor_fd: int = self._monitor.FD
        self.fds: tuple[int, int] = (self._socket.FD, self._monitor_fd)
        self.is_broken()  # a descriptor tells nothing of what comes before the first look

    def send(self, frames: deque[bytes]) -> bool:
        """Send and remove them; whether there were any."""
        sent = False
        with contextlib.suppress(zmq.Again):  # only where the connection has just broken
            while frames:
                self._socket.send(frames[0], zmq.NOBLOCK)
                frames.popleft()
                sent = True
        return sent

    def receive(self) -> bytes | None:
        """The next frame, None when there is none."""
        try:
            frame: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frame

    def is_broken(self, ready: Collection[int] = ()) -> bool:
        """What the monitor says; ``ready`` are the descriptors that a wait has given, none to look anyway."""
        if not ready or self._monitor_fd in ready:
            with contextlib.suppress(zmq.Again):
                while not self._broken:
                    told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                    self._broken = told == zmq.EVENT_DISCONNECTED
                    self.connected = self.connected or not self._broken
        return self._broken

    def close(self, linger: int = 0) -> None:
        """``linger`` is milliseconds for what was sent last."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)
