"""Fairness between tenants: what each has been served, and who is next.

Virtual token counters ("Fairness in Serving Large Language Models", Sheng et al., OSDI 2024): a tenant's counter grows
with the prompt tokens that are computed for it and the tokens that it generates, each divided by the weight of its key,
and the tenant with the least has the next turn. One that had nothing waiting is lifted to the least of those that
wait, so that idleness saves up no credit; what it has used beyond that stays its debt.

Counters are kept apart for provisioned requests, which are a class above all others.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

GENERATED = 2.0  # prompt tokens that a generated token counts for: the weights of the paper, as of usual prices
MAX_TENANTS = 4096  # whose counters are kept while they have nothing here


@dataclass(slots=True, eq=False)
class Tenant:
    """``used`` are tokens over weights. ``num_waiting`` of its ``num_unfinished`` sequences (or requests) wait."""

    used: float = 0.0
    num_waiting: int = 0
    num_unfinished: int = 0


Entry: TypeAlias = "tuple[float, int, Tenant]"
"""What it had used when it was put there, a serial number, who it is."""


class LeastServed:
    """Tenants that wait, the one that has used least first: O(log n) for each turn.

    A heap whose entries may be out of date: counters only grow, so an entry is put right when it comes to the top.
    Tenants that have used the same take turns.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._entries: dict[Tenant, int] = {}  # the serial number of each one's entry; others in the heap are void
        self._serials = count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, tenant: Tenant) -> None:
        """Let ``tenant`` wait, if it does not yet."""
        if tenant in self._entries:
            return
        self._entries[tenant] = serial = next(self._serials)
        heapq.heappush(self._heap, (tenant.used, serial, tenant))
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, tenant: Tenant) -> None:
        """Let ``tenant`` wait no more, if it does."""
        self._entries.pop(tenant, None)

    @property
    def least(self) -> Tenant | None:
        """The one that has used least, None where none waits."""
        heap = self._heap
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
        """Take out the one that has used least."""
        tenant = self.least
        if tenant is None:
            return None
        del self._entries[tenant]
        return heapq.heappop(self._heap)

    def restore(self, entry: Entry) -> None:
        """Put back what ``pop`` took out, in its old place."""
        self._entries[entry[2]] = entry[1]
        heapq.heappush(self._heap, entry)


class Tenants:
    """The counters of one engine, by tenant and class."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, bool], Tenant] = {}
        self._last: Tenant | None = None  # that had something waiting

    def of(self, name: str, provisioned: bool = False) -> Tenant:
        """The tenant of that name; of many that have nothing here any more the debts are forgotten."""
        found = self._by_name.get((name, provisioned))
        if found is None:
            if len(self._by_name) >= MAX_TENANTS:
                self._by_name = {key: one for key, one in self._by_name.items() if one.num_unfinished}
            found = self._by_name[name, provisioned] = Tenant()
        return found

    def lift(self, tenant: Tenant, least: Tenant | None) -> None:
        """``tenant``, which had nothing waiting, has now: beside ``least`` of those that wait, None where none does."""
        beside = least or self._last
        if beside is not None and beside.used > tenant.used:
            tenant.used = beside.used

    def left(self, tenant: Tenant) -> None:
        """Nothing of ``tenant`` waits any more."""
        self._last = tenant
