"""Transactions of the metering store on threads: a slow store blocks the request that needs it and no other.

SQLite has one writer at a time anyway: one thread for writes keeps this worker's from fighting each other for the lock,
another one lets reads pass. PostgreSQL serves several at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import gevent
from gevent.threadpool import ThreadPool
from sqlalchemy.exc import TimeoutError as PoolTimeout

T = TypeVar("T")


class StoreThreads:
    """A ``metering.store.Runner`` for one worker; made after the fork, on the loop's own thread."""

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
    """An error as a value: gevent prints whatever a thread raises, and ours are answers."""
    try:
        return attempt(), None
    except BaseException as error:
        return None, error
