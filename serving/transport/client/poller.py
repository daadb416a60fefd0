"""Waiting for any of a few file descriptors, made once for a connection and not for every message.

ZeroMQ's descriptor of a socket is edge-triggered: it announces new messages only while none is left unread and nothing
was done with the socket since. Read until there is nothing before waiting for it.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection
from typing import Protocol


class Poller(Protocol):
    """Waits until one of the watched descriptors can be read."""

    def watch(self, fds: Collection[int]) -> None:
        """Watch ``fds`` from now on, and no others. None may be closed while it is watched."""
        ...

    def poll(self, seconds: float, take: Callable[[int], bool]) -> Collection[int]:
        """Descriptors that can be read, at least one of those; none after ``seconds``.

        Where that spares the owner a switch, ``take`` is called with one that can be read: True where all is done that
        was to be done about it, and the owner goes on waiting. It must not block; what it raises is raised here.
        """
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

    def poll(self, seconds: float, take: Callable[[int], bool]) -> Collection[int]:
        return [fd for fd, _ in self._poll.poll(seconds * 1000)]
