"""Load shedding: refuse a request at once if the server drains, the engine's queue is full, or the caller has used up
its share of that queue."""

from __future__ import annotations

from ..interface.engine import QUEUE_FLOOR, Engine
from ..interface.errors import Overloaded, ShuttingDown
from ..metering.accounts.keys import Caller

DRAIN_RETRY_SECONDS = 5.0


class LoadShedder:
    """The gate to the queues of engines. Each of the ``workers`` processes has one load shedder.

    The engine's own queue limit is exact; this one refuses a request before any work is done for it.

    The number of waiting requests comes with the engine's heartbeat, so it lags by at most one step or beat; the
    entered requests include those of this worker that the heartbeat may not have seen yet. Requests to endpoints with
    provisioned throughput are counted separately, so that other requests' queue never keeps them out. While an engine
    is away, no request waits in it: the entered requests wait here for the next engine, and only their number limits
    further ones. A retired engine is closed only once no entered request for it is left.

    Callers with keys share the queue by dynamic thresholds (Choudhury and Hahne, 1998): a tenant may have as many
    requests waiting as there are free places, a key half as many. So one key alone fills a third of the queue, the keys
    of one tenant half of it, the keys of two tenants a third each, and there is always room for the next caller. A
    tenant whose requests waiting here fill less than a ``QUEUE_FLOOR``-th of the queue is admitted even if other
    workers' requests have filled the queue.
    """

    def __init__(self, *, max_queued: int, retry_after: float, workers: int = 1) -> None:
        self.max_queued = max_queued
        self.retry_after = retry_after
        self.workers = workers
        self.draining = False
        self._entered: dict[tuple[int, bool], list[Caller | None]] = {}  # in order of arrival

    def check_open(self) -> None:
        """Raise ``ShuttingDown`` if the server is draining."""
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after=DRAIN_RETRY_SECONDS)

    def enter(self, endpoint: str, engine: Engine, *, reserves: bool = False, caller: Caller | None = None) -> None:
        """Count a request in; ``leave`` counts it out.

        ``reserves`` says that the endpoint has provisioned throughput. With a ``caller`` of None the queue is not
        divided into shares. Raises ``ShuttingDown`` and ``Overloaded``.
        """
        self.check_open()
        entered = self._entered.get((id(engine), reserves), [])
        self._check_room(endpoint, engine, reserves, entered, caller)
        entered.append(caller)
        self._entered[id(engine), reserves] = entered

    def leave(self, engine: Engine, *, reserves: bool = False, caller: Caller | None = None) -> None:
        """Count a request out that ``enter`` counted in, with the same arguments."""
        entered = self._entered[id(engine), reserves]
        entered.remove(caller)  # removes the caller's oldest request
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
        """Raise ``Overloaded`` if the caller has used up its share of the queue.

        ``queued`` has the caller of each request that waits here; ``waiting`` is the number of requests from all
        workers that wait in the engine.
        """
        of_tenant = sum(one is not None and one.tenant == caller.tenant for one in queued)
        of_key = sum(one is not None and one.key_id == caller.key_id for one in queued)
        left = self.max_queued - max(waiting, len(queued))
        if of_tenant < self.max_queued // QUEUE_FLOOR or (of_tenant < left and 2 * of_key < left):
            return
        holder = "key" if 2 * of_key >= left else "tenant"
        allowed = f"the {self.max_queued} requests that may wait for endpoint {endpoint}"
        raise Overloaded(f"this {holder}'s share of {allowed} is used up", retry_after=self.retry_after)

    def running(self, engine: Engine) -> int:
        """Return how many requests of this worker have entered for ``engine``."""
        return sum(len(self._entered.get((id(engine), reserves), ())) for reserves in (False, True))
