"""A pool of database connections that takes no lock, so that gevent's patched locks cannot hang it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

POLL_SECONDS = 0.005  # seconds between checks for a returned connection


class ConnectionPool(sa.Pool):
    """A pool of at most ``pool_size`` connections, of which ``kept`` stay open while idle.

    If all are in use, a caller waits up to ``timeout`` seconds for one, then gets ``sqlalchemy.exc.TimeoutError``.

    SQLAlchemy's own pool has locks, which are gevent's if gevent has patched ``threading``. A thread that finds such a
    lock held by another thread asks that thread's event loop to wake it, but in the threads that run transactions
    (``store_threads``) that loop never runs, so the waiting thread would wait for ever. This pool therefore has no
    lock: each change is one operation on a deque, which no thread can interrupt.
    """

    def __init__(self, creator: Any, pool_size: int, kept: int, timeout: float, **options: Any) -> None:
        super().__init__(creator, **options)
        self._size, self._kept, self._timeout = pool_size, kept, timeout
        self._open: deque[ConnectionPoolEntry] = deque()
        self._free = deque([None] * pool_size)

    def _do_get(self) -> ConnectionPoolEntry:
        self._take_place()
        with contextlib.suppress(IndexError):
            return self._open.pop()  # the one used last, since servers close connections that are idle for long
        try:
            return self._create_connection()
        except BaseException:
            self._free.append(None)
            raise

    def _take_place(self) -> None:
        until = time.monotonic() + self._timeout
        while True:
            try:
                self._free.pop()
                return
            except IndexError:
                if time.monotonic() > until:
                    raise PoolTimeout(f"all {self._size} connections are in use") from None
            time.sleep(POLL_SECONDS)

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        try:
            if len(self._open) < self._kept:
                self._open.append(record)
            else:
                record.close()
        finally:
            self._free.append(None)

    def recreate(self) -> ConnectionPool:
        return ConnectionPool(
            self._creator,
            pool_size=self._size,
            kept=self._kept,
            timeout=self._timeout,
            pre_ping=self._pre_ping,
            reset_on_return=self._reset_on_return,
            dialect=self._dialect,
            _dispatch=self.dispatch,
        )

    def dispose(self) -> None:
        while self._open:
            self._open.pop().close()

    def status(self) -> str:
        return f"{self._size - len(self._free)} of {self._size} connections in use, {len(self._open)} open"
