"""Work that would hold up the event loop, on gevent's threads.

Decoding and tokenising a few kilobytes takes a few milliseconds and stays on the loop; megabytes take seconds, during
which no other stream of this worker would get a token. Tokenising a long text releases the interpreter lock
(``tasks.text``), so a thread really frees the loop; JSON decoding of megabytes holds it for some milliseconds at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import gevent

T = TypeVar("T")


class Offload:
    """Runs a function on a thread when ``size`` (bytes) is at least ``threshold`` and a loop is there to be freed."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold

    def __call__(self, size: int, function: Callable[..., T], *args: Any) -> T:
        if size < self.threshold or not isinstance(gevent.getcurrent(), gevent.Greenlet):
            return function(*args)
        result, error = gevent.get_hub().threadpool.apply(_outcome, (function, args))
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
