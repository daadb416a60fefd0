"""gevent's loop of the main thread, as gRPC's threads use it.

What a request goes through after gRPC is the HTTP worker's own code, made for greenlets of one loop. Here that loop is
the main thread's; nothing is patched, and gRPC's threads hand it work and wait for what comes of it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, TypeVar

import gevent

T = TypeVar("T")


class Loop:
    """To be made in the main thread."""

    def __init__(self) -> None:
        self._loop = gevent.get_hub().loop

    def spawn(self, function: Callable[[], Any]) -> None:
        """Run ``function``, which raises nothing, in a greenlet of its own. From any thread."""
        self._loop.run_callback_threadsafe(gevent.spawn, function)

    def soon(self, function: Callable[[], Any]) -> None:
        """Run ``function``, which neither waits nor raises, in the loop itself. From any thread."""
        self._loop.run_callback_threadsafe(function)

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises, run in a greenlet; the calling thread, another one, waits."""
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
