"""Fairness between tenants: how much each has been served, and who is next.

Virtual token counters ("Fairness in Serving Large Language Models", Sheng et al., OSDI 2024): a tenant's counter grows
with the prompt tokens computed for it and the tokens it generates, each divided by the weight of its key, and the
tenant with the smallest counter is next. A tenant that had nothing waiting is lifted to the smallest counter among
those that wait, so that idling earns no credit; what it has used beyond that remains its debt.

Each class of requests (``ValidRequest.service_class``) has counters of its own."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from ...interface.request import STANDARD

GENERATED_TOKEN_WEIGHT = 2.0  # in prompt tokens: the paper's weight, and the usual ratio of prices
MAX_TENANTS = 4096  # counters kept for tenants without requests


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's counter: ``used`` is in tokens over weights. ``num_waiting`` of its ``num_unfinished`` sequences (or
    requests) wait."""

    used: float = 0.0
    num_waiting: int = 0
    num_unfinished: int = 0


Entry: TypeAlias = "tuple[float, int, Tenant]"
"""The counter when the entry was made, a serial number, the tenant."""


class LeastServed:
    """A priority queue of waiting tenants, least served first; O(log n) per turn.

    Heap entries may be out of date: counters only grow, so an entry is corrected when it reaches the top. Tenants with
    equal counters take turns."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._entries: dict[Tenant, int] = {}  # the serial number of each valid entry; others in the heap are void
        self._serials = count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, tenant: Tenant) -> None:
        """Add ``tenant`` to the queue, if it is not in it."""
        if tenant in self._entries:
            return
        self._entries[tenant] = serial = next(self._serials)
        heapq.heappush(self.heap, (tenant.used, serial, tenant))
        if len(self.heap) > 2 * len(self._entries) + 16:
            self.heap = [entry for entry in self.heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self.heap)

    def discard(self, tenant: Tenant) -> None:
        """Remove ``tenant`` from the queue, if it is in it."""
        self._entries.pop(tenant, None)

    @property
    def lowest(self) -> Tenant | None:
        """Return the least served tenant, None if the queue is empty."""
        heap = self.heap
        while heap:
            used, serial, tenant = heap[0]
            if self._entries.get(tenant) != serial:
                heapq.heappop(heap)
            elif used < tenant.used:
                heapq.heapreplace(heap, (tenant.used, serial, tenant))
            else:
                return tenant
        return None

    def pop(self) -> Entry | None:
        """Remove and return the entry of the least served tenant."""
        tenant = self.lowest
        if tenant is None:
            return None
        del self._entries[tenant]
        return heapq.heappop(self.heap)

    def restore(self, entry: Entry) -> None:
        """Put back an entry that ``pop`` removed, in its old position."""
        self._entries[entry[2]] = entry[1]
        heapq.heappush(self.heap, entry)


class Tenants:
    """The counters of one engine, by tenant and class."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, int], Tenant] = {}
        self._last: Tenant | None = None  # the last one that stopped waiting

    def of(self, name: str, service_class: int = STANDARD) -> Tenant:
        """Return the tenant with that name, in a class of requests. With too many of them, the debts of those without
        requests are forgotten."""
        found = self.by_name.get((name, service_class))
        if found is None:
            if len(self.by_name) >= MAX_TENANTS:
                self.by_name = {key: one for key, one in self.by_name.items() if one.num_unfinished}
            found = self.by_name[name, service_class] = Tenant()
        return found

    def lift(self, tenant: Tenant, lowest: Tenant | None) -> None:
        """Lift ``tenant``, which starts to wait, to the counter of ``lowest``, the least served waiting tenant, if
        any."""
        beside = lowest or self._last
        if beside is not None and beside.used > tenant.used:
            tenant.used = beside.used

    def left(self, tenant: Tenant) -> None:
        """Record that nothing of ``tenant`` waits any more."""
        self._last = tenant
