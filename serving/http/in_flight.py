"""Requests that run in this worker, each of which may be interrupted from outside: a disconnect, the drain's end.

A request's greenlet spends its life blocked in ``next(pieces)``. Interrupting means raising an error right there, so
that the generator unwinds through its own ``finally`` and the engine is told to abort. It is raised only there: at
any other point (settling a lease, writing to the socket) the greenlet is left alone and the error waits for its next
pull.
"""

from __future__ import annotations

import contextlib
import errno
import select
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import gevent
from gevent import monkey

from ..errors import DeadlineExceeded

T = TypeVar("T")

TURN = 32  # pulls in a row before others may run: a reply that is all there would otherwise go out in one go
LOOK = 0.1  # seconds between looks at a peer that has sent more than its request
GRACE = 2.0  # seconds the engine has to end a late request in its own way, which tells of what was generated


class ClientGone(BrokenPipeError):
    """The client closed the connection. An EPIPE, which WSGI servers take as the end of a request, not as a fault."""

    def __init__(self) -> None:
        super().__init__(errno.EPIPE, "the client closed the connection")


class Pull(Generic[T]):
    """An iterator whose blocked ``next`` can be interrupted by ``interrupt(error)``. Pulled by one greenlet."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._blocked: Any = None
        self._pending: BaseException | None = None
        self._pulled = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._pulled += 1
        if self._pulled % TURN == 0 and _on_loop():
            gevent.sleep(0)
        if self._pending is not None:
            raise self._pending
        self._blocked = gevent.getcurrent()
        try:
            return next(self._items)
        finally:
            self._blocked = None

    def interrupt(self, error: BaseException) -> None:
        """Raise ``error`` in the blocked pull, or at the next one. The first error given wins."""
        if self._pending is not None:
            return
        self._pending = error
        if self._blocked is not None and self._blocked is not gevent.getcurrent():
            gevent.get_hub().loop.run_callback(self._throw)

    def _throw(self) -> None:
        # runs in the hub: the greenlet is not running, so if it is still inside next() it waits there
        if self._blocked is not None and self._pending is not None:
            self._blocked.throw(self._pending)

    def close(self) -> None:
        """End the iterator (a generator's ``finally`` runs). Closing twice is harmless."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


def _on_loop() -> bool:
    return isinstance(gevent.getcurrent(), gevent.Greenlet)


class RunningRequests:
    """What runs in this worker, so that a drain can wait for it and end it."""

    def __init__(self) -> None:
        self._pulls: weakref.WeakSet[Pull[Any]] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._pulls)

    @contextlib.contextmanager
    def holding(self, pull: Pull[Any]) -> Iterator[None]:
        self._pulls.add(pull)
        try:
            yield
        finally:
            self._pulls.discard(pull)

    def interrupt_all(self, error: BaseException) -> int:
        """Interrupt everything that runs; the number interrupted."""
        pulls = list(self._pulls)
        for pull in pulls:
            pull.interrupt(error)
        return len(pulls)


@contextlib.contextmanager
def ending_at(deadline: float | None, pull: Pull[Any]) -> Iterator[None]:
    """Interrupt ``pull`` with ``DeadlineExceeded`` soon after ``deadline`` (``time.monotonic``).

    The engine keeps deadlines itself; this is for one that hangs, or starts anew, just then.
    """
    if deadline is None or not _on_loop():
        yield
        return
    timer = gevent.get_hub().loop.timer(max(deadline - time.monotonic(), 0.0) + GRACE)
    timer.start(pull.interrupt, DeadlineExceeded("timeout: the request's time limit passed before it was complete"))
    try:
        yield
    finally:
        timer.stop()
        timer.close()


@contextlib.contextmanager
def watching(sock: Any, pull: Pull[Any]) -> Iterator[None]:
    """Interrupt ``pull`` with ``ClientGone`` when the peer of ``sock`` closes. ``sock`` None: nothing to watch."""
    if sock is None or not hasattr(sock, "fileno") or sock.fileno() < 0:
        yield
        return
    watch = Watch(sock.fileno(), pull)
    try:
        yield
    finally:
        watch.close()


class Watch:
    """Looks when something comes of a peer: its end, or bytes that are the next request's. Behind such bytes, and those
    that TLS says farewell with, the end is no event of its own, and is looked for now and then."""

    def __init__(self, fileno: int, pull: Pull[Any]) -> None:
        self._fileno, self._pull = fileno, pull
        loop = gevent.get_hub().loop
        self._coming, self._timer = loop.io(fileno, 1), loop.timer(LOOK, repeat=LOOK)
        self._coming.start(self._look)

    def _look(self) -> None:
        self._coming.stop()  # level-triggered: a pipelined request would call us for ever
        if not has_left(self._fileno):
            self._timer.start(self._look)
            return
        self._timer.stop()
        self._pull.interrupt(ClientGone())

    def close(self) -> None:
        for watcher in (self._coming, self._timer):
            watcher.stop()
            watcher.close()


def has_left(fileno: int) -> bool:
    """Whether the peer has closed its sending side, whatever it sent before."""
    poll = monkey.get_original("select", "poll")()
    poll.register(fileno, select.POLLRDHUP)
    return bool(poll.poll(0))
