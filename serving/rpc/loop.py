"""The main thread's gevent loop, as gRPC's threads use it.

After gRPC, a request runs through the code of the HTTP worker, which is made for greenlets of one loop. Here this is
the main thread's loop; nothing is monkey-patched, and gRPC's threads hand work to the loop and wait for the results.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, TypeVar

import gevent

T = TypeVar("T")


class Loop:
    """The gevent loop of the thread that creates this object, which must be the main thread."""

    def __init__(self) -> None:
        self._loop = gevent.get_hub().loop

    def spawn(self, function: Callable[[], Any]) -> None:
        """Run ``function``, which must not raise, in a new greenlet. May be called from any thread."""
        self._loop.run_callback_threadsafe(gevent.spawn, function)

    def soon(self, function: Callable[[], Any]) -> None:
        """Run ``function``, which must neither wait nor raise, in the loop itself. May be called from any thread."""
        self._loop.run_callback_threadsafe(function)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a greenlet, wait, and return or raise its result. Not for the loop's own thread."""
        box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                box.put((function(), None))
            except BaseException as error:
                box.put((None, error))

        self.spawn(run)
        result, error = box.get()
        if error is not None:
            raise error
        found: T = result
        return found
