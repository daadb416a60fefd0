"""Wait for the first bytes of a stream, no longer at a time than its client and the proxies before it.

Proxies cut a response of which they have seen nothing for a minute, and a long prompt or an engine that loads may take
longer. So the bytes are made on a greenlet of their own, and the stream's own greenlet may say something meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, NamedTuple

import gevent
from gevent.hub import Waiter

from .in_flight import ClientGone

MAX_IDLE_MAKERS = 64
"""Greenlets that are kept for the next streams: to make one costs more than the rest of a stream's start."""


class Patience(NamedTuple):
    """For how many seconds a stream's first bytes are waited for ``at_first``, and ``then`` before each sign of life.
    ``interrupt`` ends what makes the bytes (``InterruptibleIterator.interrupt``)."""

    at_first: float
    then: float
    interrupt: Callable[[BaseException], None]


class FirstBytes:
    """The first bytes of a stream, which ``make`` returns or fails to."""

    def __init__(self, make: Callable[[], bytes], patience: Patience) -> None:
        self._patience = patience
        self._seconds = patience.at_first
        self._made: tuple[bytes, BaseException | None] | None = None
        self._waiter: Any = None
        _idle_maker().start(self, make)

    def are_ready(self) -> bool:
        """Wait for them as long as patience lasts, and return whether they are ready."""
        self._wait(self._seconds)
        self._seconds = self._patience.then
        return self._made is not None

    def get(self) -> bytes:
        """Return the bytes, which are ready. Raises what ``make`` raised."""
        assert self._made is not None
        data, error = self._made
        if error is not None:
            raise error
        return data

    def abandon(self) -> None:
        """End the making of the bytes, if it goes on, because nobody wants them."""
        if self._made is None:
            self._patience.interrupt(ClientGone())
            self._wait(None)

    def made(self, outcome: tuple[bytes, BaseException | None]) -> None:
        """Take the bytes, or the error in their place."""
        self._made = outcome
        if self._waiter is not None:
            gevent.get_hub().loop.run_callback(self._waiter.switch, None)

    def _wait(self, seconds: float | None) -> None:
        if self._made is not None:
            return
        hub = gevent.get_hub()
        self._waiter = Waiter(hub)
        timer = None if seconds is None else hub.loop.timer(seconds)
        if timer is not None:
            timer.start(self._waiter.switch, None)
        try:
            self._waiter.get()
        finally:
            self._waiter = None
            if timer is not None:
                timer.stop()
                timer.close()


class _Maker:
    """A greenlet that makes the first bytes of one stream after another."""

    def __init__(self) -> None:
        self.hub = gevent.get_hub()
        self._waiter: Any = Waiter(self.hub)
        Context().run(gevent.spawn, self._run)  # not in that of the first stream, which would be kept

    def start(self, first: FirstBytes, make: Callable[[], bytes]) -> None:
        """Have the bytes made that ``first`` waits for, in the caller's context."""
        self.hub.loop.run_callback(self._waiter.switch, (first, make, copy_context()))

    def _run(self) -> None:
        while True:
            try:
                first, make, context = self._waiter.get()
            except BaseException:  # the process ends
                if self in _idle:
                    _idle.remove(self)
                raise
            first.made(context.run(_outcome, make))
            del first, make, context
            if len(_idle) >= MAX_IDLE_MAKERS:
                return
            self._waiter.clear()
            _idle.append(self)


_idle: list[_Maker] = []


def _idle_maker() -> _Maker:
    """Return a maker that has nothing to do, of the caller's event loop."""
    while _idle:
        if (maker := _idle.pop()).hub is gevent.get_hub():
            return maker
    return _Maker()


def _outcome(make: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
    """Return what ``make`` returned or raised: gevent would write the traceback of an error to the log."""
    try:
        return make(), None
    except BaseException as error:
        return b"", error
