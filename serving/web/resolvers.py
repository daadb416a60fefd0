"""The processes that look models up (``entry``), few at a time: each imports MLflow and takes some 200 MB.

A place among ``limit`` is a lock on a file of the server's directory, which its workers and its keeper share and the
kernel gives back when its holder dies. Who asks for what is already being looked up in this process waits for that
answer; others wait for a place, in the order in which they came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import Overloaded, ShuttingDown
from ..transport.locks import FileLock, try_acquire
from .entry import Resolved, resolve

POLL_INTERVAL = 0.05
MAX_WAITING = 64  # lookups of a process, those under way among them
RETRY_AFTER = 5.0

Uris = tuple[str, ...]


class _Lookup:
    """One that is under way; ``found`` and ``error`` stay None where who began it was stopped."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.found: tuple[Resolved, ...] | None = None
        self.error: Exception | None = None


class Resolvers:
    """Called as ``entry.resolve`` is. ``directory`` is the server's, ``timeout`` (seconds) each lookup's, and that of
    the wait for a place. Thread-safe, and for greenlets where gevent has patched the process."""

    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        timeout: float,
        find: Callable[..., tuple[Resolved, ...]] = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._limit, self._timeout = directory, limit, timeout
        self._find, self._clock, self._sleep = find, clock, sleep
        self._lookups: dict[tuple[Uris, Uris], _Lookup] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def __call__(self, uris: Uris, texts: Uris = ()) -> tuple[Resolved, ...]:
        """Raises as ``entry.resolve`` does, and ``Overloaded``, ``ShuttingDown``."""
        key = (uris, texts)
        while True:
            lookup, mine = self._join(key)
            if mine:
                return self._look_up(key, lookup)
            lookup.over.wait()
            if lookup.error is not None:
                raise lookup.error
            if lookup.found is not None:
                return lookup.found

    def _join(self, key: tuple[Uris, Uris]) -> tuple[_Lookup, bool]:
        with self._lock:
            if key in self._lookups:
                return self._lookups[key], False
            if len(self._lookups) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} models are being looked up already", retry_after=RETRY_AFTER)
            self._lookups[key] = _Lookup()
            return self._lookups[key], True

    def _look_up(self, key: tuple[Uris, Uris], lookup: _Lookup) -> tuple[Resolved, ...]:
        uris, texts = key
        try:
            place = self._place()
            try:
                lookup.found = self._find(uris, texts, timeout=self._timeout)
            finally:
                place.release()
            return lookup.found
        except Exception as error:
            lookup.error = error
            raise
        finally:
            with self._lock:
                del self._lookups[key]
            lookup.over.set()

    def _place(self) -> FileLock:
        deadline = self._clock() + self._timeout
        with self._turn:
            while True:
                for number in range(self._limit):
                    try:
                        lock = try_acquire(str(self._directory / f"resolver-{number}.lock"))
                    except FileNotFoundError:
                        raise ShuttingDown("the server has ended") from None
                    if lock is not None:
                        return lock
                if self._clock() > deadline:
                    text = f"max_resolvers, {self._limit}, are busy looking up other models"
                    raise Overloaded(text, retry_after=RETRY_AFTER)
                self._sleep(POLL_INTERVAL)
