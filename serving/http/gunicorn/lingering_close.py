"""Lingering close: keep reading a connection for a while after its last response, so that the response arrives.

Closing a socket that has unread bytes would reset the connection, and the client might never see the response.
"""

from __future__ import annotations

import contextlib
import socket

import gevent

LINGER_SECONDS = 5.0  # seconds


def linger(client: socket.socket) -> None:
    """Shut down the sending side and discard what the client sends, until it closes, at most ``LINGER_SECONDS``."""
    with contextlib.suppress(OSError), gevent.Timeout(LINGER_SECONDS, False):
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
