"""Lingering close: a connection is read on for a while after its last answer, so that the answer arrives.

Closing on unread bytes would reset the connection, and the client might never see what was said to it.
"""

from __future__ import annotations

import contextlib
import socket

import gevent

LINGER = 5.0  # seconds


def linger(client: socket.socket) -> None:
    """End the sending side and drop what the client still sends, until it closes or ``LINGER`` seconds have passed."""
    with contextlib.suppress(OSError), gevent.Timeout(LINGER, False):
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
