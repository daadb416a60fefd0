"""Waiting for any of a few file descriptors, made once for a connection and not for every message.

ZeroMQ's descriptor of a socket tells of new messages only while none is left unread and nothing was done with the
socket since: who waits for it has read until there was nothing.
"""

from __future__ import annotations

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
