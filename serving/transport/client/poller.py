"""Wait for any of a few file descriptors. A poller is set up once per connection and not for every message.

The descriptor of a ZeroMQ socket is edge-triggered: it only announces new messages if none was left unread and the
socket was not used since. Read all messages before waiting for it.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection
from typing import Protocol


class Poller(Protocol):
    """A poller that waits until one of the watched descriptors can be read."""

    def watch(self, fds: Collection[int]) -> None:
        """Watch only ``fds`` from now on. None of them may be closed while it is watched."""
        ...

    def poll(self, seconds: float, take: Callable[[int], bool]) -> Collection[int]:
        """Wait, and return at least one of the descriptors that can be read, or none after ``seconds``.

        If that saves a switch to the owner, ``take`` is called with a readable descriptor. It returns True if nothing
        is left to do for it; then the owner continues to wait. It must not block; its errors are raised here.
        """
        ...


class ThreadPoller:
    """The poller for a loop that has its own thread."""

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
