"""Whether a request may enter now: refused while the server drains or the engine's queue is full."""

from __future__ import annotations

from ..engine.interface import Engine
from ..errors import Overloaded, ShuttingDown

DRAIN_RETRY_AFTER = 5.0


class Gate:
    """One a worker. The engine's own queue bound is exact; this one answers before any work has been done.

    The number of waiting requests comes with the engine's heartbeat, so it lags by at most one step or beat; what has
    entered counts this worker's requests that the heartbeat may not have seen yet. An engine that is given up is closed
    only once nothing that entered for it is left.
    """

    def __init__(self, *, max_queued: int, retry_after: float) -> None:
        self.max_queued = max_queued
        self.retry_after = retry_after
        self.draining = False
        self._running: dict[int, int] = {}

    def check_open(self) -> None:
        """Raises ``ShuttingDown`` while the server drains."""
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after=DRAIN_RETRY_AFTER)

    def enter(self, endpoint: str, engine: Engine) -> None:
        """Count a request in; ``leave`` counts it out. Raises ``ShuttingDown``, ``Overloaded``."""
        self.check_open()
        running = self.running(engine)
        capacity = engine.info.max_num_seqs * max(1, getattr(engine, "count", 1)) + self.max_queued
        if running >= capacity or engine.health().num_waiting >= self.max_queued:
            raise Overloaded(
                f"endpoint {endpoint} has {self.max_queued} requests waiting already", retry_after=self.retry_after
            )
        self._running[id(engine)] = running + 1

    def leave(self, engine: Engine) -> None:
        left = self._running[id(engine)] - 1
        if left:
            self._running[id(engine)] = left
        else:
            del self._running[id(engine)]

    def running(self, engine: Engine) -> int:
        """Requests of this worker that have entered for ``engine``."""
        return self._running.get(id(engine), 0)
