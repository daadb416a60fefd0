"""Load shedding: a request is refused at once while the server drains, the engine's queue is full, or too much of it is
the caller's own."""

from __future__ import annotations

from ..engine.interface import QUEUE_FLOOR, Engine
from ..errors import Overloaded, ShuttingDown
from ..metering.keys import Caller

DRAIN_RETRY_AFTER = 5.0


class LoadShedder:
    """Admits requests to engines' queues, one object in each of ``workers`` processes. The engine's own queue bound is
    exact; this one answers before any work is done.

    The number of waiting requests comes with the engine's heartbeat, so it lags by at most one step or beat; what has
    entered counts this worker's requests that the heartbeat may not have seen yet. Requests to endpoints with
    provisioned throughput are counted apart, so that no queue of others keeps them out. While an engine is away nothing
    waits in it: what has entered here waits for the next one, and alone bounds what may. An engine that is given up is
    closed only once nothing that entered for it is left.

    Callers with keys share the queue by dynamic thresholds (Choudhury and Hahne, 1998): a tenant may have as many
    requests waiting as places are left, a key half as many. So one key alone fills a third of the queue, the keys of
    one tenant half, of two tenants a third each, and there is always room for the next to come. A tenant with less than
    a ``QUEUE_FLOOR``-th of the queue waiting here is let in even where other workers' requests have filled it.
    """

    def __init__(self, *, max_queued: int, retry_after: float, workers: int = 1) -> None:
        self.max_queued = max_queued
        self.retry_after = retry_after
        self.workers = workers
        self.draining = False
        self._entered: dict[tuple[int, bool], list[Caller | None]] = {}  # in order of arrival

    def check_open(self) -> None:
        """Raises ``ShuttingDown`` while the server drains."""
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after=DRAIN_RETRY_AFTER)

    def enter(self, endpoint: str, engine: Engine, *, reserves: bool = False, caller: Caller | None = None) -> None:
        """Count a request in; ``leave`` counts it out. ``reserves``: to an endpoint with provisioned throughput.
        ``caller`` None: all callers are one, and there are no shares.

        Raises ``ShuttingDown``, ``Overloaded``.
        """
        self.check_open()
        entered = self._entered.get((id(engine), reserves), [])
        self._check_room(endpoint, engine, reserves, entered, caller)
        entered.append(caller)
        self._entered[id(engine), reserves] = entered

    def leave(self, engine: Engine, *, reserves: bool = False, caller: Caller | None = None) -> None:
        """Count a request out, as it was counted in by ``enter``."""
        entered = self._entered[id(engine), reserves]
        entered.remove(caller)  # the caller's oldest
        if not entered:
            del self._entered[id(engine), reserves]

    def _check_room(
        self, endpoint: str, engine: Engine, reserves: bool, entered: list[Caller | None], caller: Caller | None
    ) -> None:
        at_once = engine.info.max_num_seqs * max(1, engine.num_replicas)
        health = engine.health()
        waiting = health.num_provisioned - at_once if reserves else health.num_waiting
        full = f"endpoint {endpoint} has {self.max_queued} requests waiting already"
        if len(entered) >= at_once + self.max_queued:
            raise Overloaded(full, retry_after=self.retry_after)
        if caller is None:
            if waiting >= self.max_queued:
                raise Overloaded(full, retry_after=self.retry_after)
        elif waiting > 0 or len(entered) >= at_once:
            self._check_share(endpoint, entered[max(1, at_once // self.workers) :], waiting, caller)

    def _check_share(self, endpoint: str, queued: list[Caller | None], waiting: int, caller: Caller) -> None:
        """``queued`` are the callers of what waits here, ``waiting`` is what waits in the engine for all workers."""
        of_tenant = sum(one is not None and one.tenant == caller.tenant for one in queued)
        of_key = sum(one is not None and one.key_id == caller.key_id for one in queued)
        left = self.max_queued - max(waiting, len(queued))
        if of_tenant < self.max_queued // QUEUE_FLOOR or (of_tenant < left and 2 * of_key < left):
            return
        holder = "key" if 2 * of_key >= left else "tenant"
        most = f"the {self.max_queued} requests that may wait for endpoint {endpoint}"
        raise Overloaded(f"this {holder}'s share of {most} is used up", retry_after=self.retry_after)

    def running(self, engine: Engine) -> int:
        """Requests of this worker that have entered for ``engine``."""
        return sum(len(self._entered.get((id(engine), reserves), ())) for reserves in (False, True))
