"""A ZeroMQ connection to an engine's socket, with its monitor."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..auth import secure_client

EVENTS, READABLE, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)  # plain ints cost less per frame


class Connection:
    """A DEALER socket connected to ``endpoint``. Owned by one thread; no method waits.

    ``fds`` become readable when there is something to read (see ``poller``). ``connected`` says whether the handshake
    has succeeded, that is, the other side has our key. ``secret`` is the shared key, None on the same host. Raises
    ``zmq.ZMQError``.
    """

    def __init__(self, context: Any, endpoint: str, secret: bytes | None) -> None:
        self.endpoint = endpoint
        self.connected = self._broken = False
        self.socket = context.socket(zmq.DEALER)
        try:
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.socket.setsockopt(zmq.RCVHWM, 0)
            if secret is not None:
                secure_client(self.socket, secret)
            self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self.socket.connect(endpoint)
        except BaseException:  # no descriptors are left; a socket that stays open would keep the context from ending
            self.socket.close(0)
            raise
        self._monitor_fd: int = self._monitor.FD
        self.fds: tuple[int, int] = (self.socket.FD, self._monitor_fd)
        self.is_broken()  # ZeroMQ's descriptors are edge-triggered: read once before the first wait

    def send(self, frames: deque[bytes]) -> bool:
        """Send and remove ``frames``; return whether any was sent."""
        sent = False
        with contextlib.suppress(zmq.Again):  # only raised if the connection has just broken
            while frames:
                self.socket.send(frames[0], zmq.NOBLOCK)
                frames.popleft()
                sent = True
        return sent

    def receive(self) -> bytes | None:
        """Return the next frame, or None if there is none."""
        if not self.socket.getsockopt(EVENTS) & READABLE:  # cheaper than the exception of ``recv``
            return None
        frame: bytes = self.socket.recv(NOBLOCK)
        return frame

    def is_broken(self, ready: Collection[int] = ()) -> bool:
        """Return whether the monitor has reported a disconnect.

        ``ready`` are the descriptors that a poll returned; without any, the monitor is read in any case.
        """
        if not ready or self._monitor_fd in ready:
            with contextlib.suppress(zmq.Again):
                while not self._broken:
                    event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                    self._broken = event == zmq.EVENT_DISCONNECTED
                    self.connected = self.connected or not self._broken
        return self._broken

    def close(self, linger: int = 0) -> None:
        """Close the sockets. ``linger`` is how many milliseconds the last frames have to be sent."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger)
