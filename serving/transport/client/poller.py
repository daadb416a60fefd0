"""Waiting for any of a few file descriptors, made once for a connection and not for every message.

ZeroMQ's descriptor of a socket tells of new messages only while none is left unread and nothing was done with the
socket since: who waits for it has read until there was nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection
from typing import Protocol


class Poller(Protocol):
    """Waits for the descriptors in ``watch``."""

    def watch(self, fds: Collection[int]) -> None:
        """From now on these; none is closed before it is taken back."""
        ...

    def poll(self, seconds: float) -> Collection[int]:
        """Those that can be read, at least one of them; none after ``seconds``."""
        ...


class ThreadPoller:
    """For a loop that has a thread of its own."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: tuple[int, ...] = ()

    def watch(self, fds: Collection[int]) -> None:
        for fd in self._watched:
            self._poll.unregister(fd)
        for fd in fds:
            self._poll.register(fd, select.POLLIN)
        self._watched = tuple(fds)

    def poll(self, seconds: float) -> Collection[int]:
        return [fd for fd, _ in self._poll.poll(seconds * 1000)]


class WakePipe:
    """Wakes a poller from any thread or signal handler: the self-pipe trick. ``fd`` is to be watched."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes as well
            os.write(self._write_fd, b"x")

    def drain(self) -> None:
        """Take back what woke the poller."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Idempotent; also in a forked child, whose copies these are."""
        for fd in (self.fd, self._write_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.fd = self._write_fd = -1
