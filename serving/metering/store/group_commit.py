"""Group commit: what arrives while a transaction runs goes into the next one, all of it together.

A tenant's requests lock the same windows, and can only be admitted one transaction after the other. One request a
transaction would bound a tenant's rate by the distance to the database; with group commit a transaction has as many as
are waiting, and the exactness of one transaction a request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")

MAX_GROUP = 256
"""Items of one transaction: more would hold the windows' locks for longer than other servers should wait."""


class Signal(Protocol):
    """The part of ``threading.Event`` that is needed here."""

    def set(self) -> object: ...
    def wait(self) -> object: ...


make_signal: Callable[[], Signal] = threading.Event


def use_signal(make: Callable[[], Signal]) -> None:
    """Have callers wait for each other by what ``make`` returns: greenlets must not block their thread, as
    ``threading.Event`` does in a process that is not monkey-patched."""
    global make_signal
    make_signal = make


class _Entry(Generic[T, R]):
    """One item on its way. ``event`` is set when it has its outcome, or when it is its caller's turn to lead."""

    __slots__ = ("error", "event", "is_done", "item", "leads", "result")

    def __init__(self, item: T) -> None:
        self.item, self.event = item, make_signal()
        self.leads, self.is_done = False, False
        self.result: R | None = None
        self.error: BaseException | None = None


class _Interrupted(Exception):
    """The caller that led the group was killed; whether the group was committed is not known."""


class GroupCommit(Generic[T, R]):
    """Groups of items, of which one runs at a time in each lane. Thread-safe.

    ``run(items)`` returns a result or an exception for each item, or raises for all of them. It must recognise items
    that it has done before: if the caller that leads a group is killed, the others hand theirs in again.
    """

    def __init__(self, run: Callable[[Sequence[T]], Sequence[R | Exception]]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._lanes: dict[str, list[_Entry[T, R]]] = {}  # what waits; a lane that is here is busy

    @property
    def waiting(self) -> int:
        """The number of items that wait for the group before theirs."""
        with self._lock:
            return sum(map(len, self._lanes.values()))

    def __call__(self, lane: str, item: T) -> R:
        """Return the result of ``item`` or raise its exception; another caller's thread may run it."""
        while True:
            try:
                return self._once(lane, item)
            except _Interrupted:
                continue

    def _once(self, lane: str, item: T) -> R:
        entry: _Entry[T, R] = _Entry(item)
        with self._lock:
            waiting = self._lanes.get(lane)
            if waiting is None:
                self._lanes[lane], entry.leads = [entry], True
            else:
                waiting.append(entry)
        if not entry.leads:
            try:
                entry.event.wait()
            except BaseException:
                self._abandon(lane, entry)
                raise
        if entry.leads and not entry.is_done:
            self._lead(lane)
        if entry.error is not None:
            raise entry.error
        return cast("R", entry.result)

    def _lead(self, lane: str) -> None:
        with self._lock:
            waiting = self._lanes[lane]
            group, waiting[:] = waiting[:MAX_GROUP], waiting[MAX_GROUP:]
        outcomes: Sequence[R | Exception] | None = None
        failed: Exception | None = None
        try:
            outcomes = self._run([entry.item for entry in group])
        except Exception as error:
            failed = error
        finally:  # even if the greenlet is killed here
            self._promote(lane)
            for i, entry in enumerate(group):
                outcome = failed or _Interrupted() if outcomes is None else outcomes[i]
                if isinstance(outcome, Exception):
                    entry.error = outcome
                else:
                    entry.result = outcome
                entry.is_done = True
                entry.event.set()

    def _promote(self, lane: str) -> None:
        """Let the first that waits lead the next group; without any, the lane is free."""
        with self._lock:
            waiting = self._lanes[lane]
            if waiting:
                waiting[0].leads = True
                waiting[0].event.set()
            else:
                del self._lanes[lane]

    def _abandon(self, lane: str, entry: _Entry[T, R]) -> None:
        """Take back an item whose caller was killed while it waited; it may be in a group that runs."""
        with self._lock:
            waiting = self._lanes.get(lane, [])
            if entry in waiting:
                waiting.remove(entry)
        if entry.leads and not entry.is_done:
            self._promote(lane)
