"""Whether a request may enter now: refused while the server drains or the engine's queue is full."""

from __future__ import annotations

from ..engine.interface import Engine
from ..errors import Overloaded, ShuttingDown

DRAIN_RETRY_AFTER = 5.0


class Gate:
    """One a worker. The engine's own queue bound is exact; this one answers before any work has been done.

    The number of waiting requests comes with the engine's heartbeat, so it lags by at most one step or beat; what has
    entered counts this worker's requests that the heartbeat may not have seen yet. Requests to endpoints that reserve
    capacity are counted apart, so that no queue of others keeps them out. While an engine is away nothing waits in it:
    what has entered here waits for the next one, and alone bounds what may. An engine that is given up is closed only
    once nothing that entered for it is left.
    """

    def __init__(self, *, max_queued: int, retry_after: float) -> None:
        self.max_queued = max_queued
        self.retry_after = retry_after
        self.draining = False
        self._running: dict[tuple[int, bool], int] = {}

    def check_open(self) -> None:
        """Raises ``ShuttingDown`` while the server drains."""
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after=DRAIN_RETRY_AFTER)

    def enter(self, endpoint: str, engine: Engine, *, reserves: bool = False) -> None:
        """Count a request in; ``leave`` counts it out. Raises ``ShuttingDown``, ``Overloaded``."""
        self.check_open()
        running = self._running.get((id(engine), reserves), 0)
        at_once = engine.info.max_num_seqs * max(1, getattr(engine, "count", 1))
        health = engine.health()
        waiting = health.num_reserved - at_once if reserves else health.num_waiting
        if running >= at_once + self.max_queued or waiting >= self.max_queued:
            raise Overloaded(
                f"endpoint {endpoint} has {self.max_queued} requests waiting already", retry_after=self.retry_after
            )
        self._running[id(engine), reserves] = running + 1

    def leave(self, engine: Engine, *, reserves: bool = False) -> None:
        left = self._running[id(engine), reserves] - 1
        if left:
            self._running[id(engine), reserves] = left
        else:
            del self._running[id(engine), reserves]

    def running(self, engine: Engine) -> int:
        """Requests of this worker that have entered for ``engine``."""
        return sum(self._running.get((id(engine), reserves), 0) for reserves in (False, True))
