"""Offloading: run work on threads that would block the event loop.

Decoding and tokenising a few kilobytes takes a few milliseconds and stays on the loop; megabytes take seconds, during
which no other stream of this worker would get a token. A thread frees the loop only while its work releases the
interpreter lock: tokenising releases it the whole time (``tasks.text``), Python code every ``SWITCH_SECONDS`` seconds
(``give_way``), and a single call into C, such as decoding 4 MB of JSON, only at its end.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import gevent
from gevent.threadpool import ThreadPool

T = TypeVar("T")

NUM_THREADS = 4  # large bodies processed at the same time; more would take CPU time from the engine
# Seconds a thread keeps the interpreter lock while the loop waits for it, as it does at each send.
SWITCH_SECONDS = 0.0002


def give_way() -> None:
    """Set up a worker process for streams: its threads hold the interpreter lock and the cores only for short times."""
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise a batch of texts would use every core
    gc.collect()
    gc.freeze()  # the current objects stay for good; a collection that visits all of them would be a pause of 0.1 s


class Offload:
    """A way to run a function on a thread if ``size`` (bytes) is at least ``threshold`` and the caller runs on an event
    loop; otherwise calls it directly."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._threads: ThreadPool | None = None

    def __call__(self, size: int, function: Callable[..., T], *args: Any) -> T:
        if size < self.threshold or not isinstance(gevent.getcurrent(), gevent.Greenlet):
            return function(*args)
        if self._threads is None:  # created late, because threads do not survive a fork
            self._threads = ThreadPool(NUM_THREADS)
        result, error = self._threads.apply(_outcome, (function, args))
        if error is not None:
            raise error
        found: T = result
        return found


def _outcome(function: Callable[..., T], args: tuple[Any, ...]) -> tuple[T | None, Exception | None]:
    """Return the function's result and its error. An error that left a gevent thread would be printed as a fault, but
    it may be an ordinary refusal."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error
