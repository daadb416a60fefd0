"""In-flight requests of a worker, each of which may be interrupted by a disconnect, its deadline or the drain's end.

A request's greenlet is blocked in ``next(pieces)`` most of the time. Interrupting it means raising an error right
there, so that the generator unwinds through its own ``finally`` and the engine gets the abort. The error is raised only
there: at any other point (settling a lease, writing to the socket) the greenlet is not disturbed, and the error waits
for its next pull.
"""

from __future__ import annotations

import contextlib
import errno
import select
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeAlias, TypeVar

import gevent
from gevent import monkey

from ...interface.errors import DeadlineExceeded

T = TypeVar("T")

MAX_PULLS_IN_A_ROW = 32  # before other greenlets may run: a reply that is already complete would block them all
POLL_SECONDS = 0.1  # seconds between checks of a peer that has sent more than its request
GRACE_SECONDS = 2.0  # seconds in which the engine itself may end a late request and return what was generated


class ClientGone(BrokenPipeError):
    """The client closed the connection. An EPIPE, because WSGI servers treat that as the end of a request, not as an
    error."""

    def __init__(self) -> None:
        super().__init__(errno.EPIPE, "the client closed the connection")


class InterruptibleIterator(Generic[T]):
    """An iterator whose blocked ``next`` can be interrupted by ``interrupt(error)``. Only one greenlet may pull it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._blocked: Any = None
        self._pending: BaseException | None = None
        self._num_pulled = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._num_pulled += 1
        if self._num_pulled % MAX_PULLS_IN_A_ROW == 0 and _on_loop():
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
        # runs in the hub, so the greenlet is not running: if it is still inside next(), it is waiting there
        if self._blocked is not None and self._pending is not None:
            self._blocked.throw(self._pending)

    def close(self) -> None:
        """End the iterator (a generator's ``finally`` runs). Closing twice is harmless."""
        self._pending = None  # the traceback of an error that was raised leads back to this iterator: a cycle
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


Watch: TypeAlias = Callable[[InterruptibleIterator[Any]], AbstractContextManager[None]]
"""A maker of a context in which an iterator is interrupted when nobody waits for it any more."""


def unwatched(_: InterruptibleIterator[Any]) -> AbstractContextManager[None]:
    """Return a context in which nothing is interrupted."""
    return contextlib.nullcontext()


def _on_loop() -> bool:
    return isinstance(gevent.getcurrent(), gevent.Greenlet)


class InFlightRequests:
    """The in-flight requests of this worker, so that a drain can wait for them and end them."""

    def __init__(self) -> None:
        self._tracked: weakref.WeakSet[InterruptibleIterator[Any]] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._tracked)

    @contextlib.contextmanager
    def track(self, pieces: InterruptibleIterator[Any]) -> Iterator[None]:
        self._tracked.add(pieces)
        try:
            yield
        finally:
            self._tracked.discard(pieces)

    def interrupt_all(self, error: BaseException) -> int:
        """Interrupt all in-flight requests and return their number."""
        interrupted = list(self._tracked)
        for one in interrupted:
            one.interrupt(error)
        return len(interrupted)


@contextlib.contextmanager
def interrupt_at_deadline(deadline: float | None, pieces: InterruptibleIterator[Any]) -> Iterator[None]:
    """Interrupt ``pieces`` with ``DeadlineExceeded`` soon after ``deadline`` (``time.monotonic``).

    Engines enforce deadlines themselves; this is for an engine that hangs or restarts just then.
    """
    if deadline is None or not _on_loop():
        yield
        return
    timer = gevent.get_hub().loop.timer(max(deadline - time.monotonic(), 0.0) + GRACE_SECONDS)
    timer.start(pieces.interrupt, DeadlineExceeded("timeout: the request's time limit passed before it was complete"))
    try:
        yield
    finally:
        timer.stop()
        timer.close()


@contextlib.contextmanager
def interrupt_on_disconnect(sock: Any, pieces: InterruptibleIterator[Any]) -> Iterator[None]:
    """Interrupt ``pieces`` with ``ClientGone`` when the peer of ``sock`` closes. A ``sock`` of None is not watched."""
    if sock is None or not hasattr(sock, "fileno") or sock.fileno() < 0:
        yield
        return
    watch = DisconnectWatch(sock.fileno(), pieces)
    try:
        yield
    finally:
        watch.close()


class DisconnectWatch:
    """A watch that detects that a peer has closed its connection.

    It checks when the socket becomes readable, by the peer's close or by bytes of the next request. After such bytes,
    or a TLS close_notify, the close causes no new event, so it is polled for.
    """

    def __init__(self, fileno: int, pieces: InterruptibleIterator[Any]) -> None:
        self._fileno, self._pieces = fileno, pieces
        loop = gevent.get_hub().loop
        self._coming, self._timer = loop.io(fileno, 1), loop.timer(POLL_SECONDS, repeat=POLL_SECONDS)
        self._coming.start(self._look)

    def _look(self) -> None:
        self._coming.stop()  # level-triggered: a pipelined request would trigger it forever
        if not has_hung_up(self._fileno):
            self._timer.start(self._look)
            return
        self._timer.stop()
        self._pieces.interrupt(ClientGone())

    def close(self) -> None:
        for watcher in (self._coming, self._timer):
            watcher.stop()
            watcher.close()


def has_hung_up(fileno: int) -> bool:
    """Return whether the peer has closed its sending side, whatever it sent before."""
    poll = monkey.get_original("select", "poll")()
    poll.register(fileno, select.POLLRDHUP)
    return bool(poll.poll(0))
