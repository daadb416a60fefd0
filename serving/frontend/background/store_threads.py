"""Run transactions of the metering store on threads, so that a slow store blocks only the request that needs it.

SQLite allows only one writer at a time: with one thread for writes, this worker's writes do not compete for the lock,
and a second thread lets reads proceed. PostgreSQL serves several transactions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import gevent
from gevent.threadpool import ThreadPool
from sqlalchemy.exc import TimeoutError as PoolTimeout

T = TypeVar("T")


class StoreThreads:
    """A ``metering.store.Runner`` for one worker. Create it after the fork, on the event loop's thread."""

    def __init__(self, *, writers: int, readers: int) -> None:
        self._writers, self._readers = ThreadPool(writers), ThreadPool(readers)

    @classmethod
    def for_url(cls, url: str) -> StoreThreads:
        return cls(writers=8, readers=4) if url.startswith("postgres") else cls(writers=1, readers=1)

    def __call__(self, attempt: Callable[[], T], *, read: bool, seconds: float | None) -> T:
        pool = self._readers if read else self._writers
        with gevent.Timeout(seconds, PoolTimeout("the store is stuck")):
            result, error = pool.apply(_caught, (attempt,))
        if error is not None:
            raise error
        found: T = result
        return found


def _caught(attempt: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return the result and the error as values: gevent prints any error that a thread raises, but these errors are
    handled by the caller."""
    try:
        return attempt(), None
    except BaseException as error:
        return None, error
