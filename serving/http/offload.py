"""Offloading: work that would block the event loop runs on threads.

Decoding and tokenising a few kilobytes takes a few milliseconds and stays on the loop; megabytes take seconds, during
which no other stream of this worker would get a token. A thread frees the loop as far as its work lets go of the
interpreter: tokenising does for its whole length (``tasks.text``), Python code does every ``SWITCH`` seconds
(``give_way``), a single call into C, such as the JSON decoding of 4 MB, does at its end.
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

THREADS = 4  # large bodies read at the same time; more would take the processor from the engine
SWITCH = 0.0002  # seconds a thread keeps the interpreter while the loop wants it; each send of the loop asks anew


def give_way() -> None:
    """Set a worker process up for streams: its threads hold the interpreter and the cores for short times only."""
    sys.setswitchinterval(SWITCH)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch of texts would take every core
    gc.collect()
    gc.freeze()  # what is there now stays: a collection that walks through all of it is a pause of 0.1 s


class Offload:
    """Runs a function on a thread when ``size`` (bytes) is at least ``threshold`` and a loop is there to be freed."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._threads: ThreadPool | None = None

    def __call__(self, size: int, function: Callable[..., T], *args: Any) -> T:
        if size < self.threshold or not isinstance(gevent.getcurrent(), gevent.Greenlet):
            return function(*args)
        if self._threads is None:  # not before the fork: threads belong to one process
            self._threads = ThreadPool(THREADS)
        result, error = self._threads.apply(_outcome, (function, args))
        if error is not None:
            raise error
        found: T = result
        return found


def _outcome(function: Callable[..., T], args: tuple[Any, ...]) -> tuple[T | None, Exception | None]:
    """What came of it. gevent's threads would print an error that leaves them, and a refusal is no fault of ours."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error
