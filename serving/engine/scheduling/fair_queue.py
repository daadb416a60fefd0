"""The queue of waiting sequences: by rank, then fairly between tenants, then by arrival.

A rank is a class of sequences (``ValidRequest.service_class``), then the priority. Within a rank the tenant that has
been served least is next (``tenants``), and within a tenant the sequence that came first.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from itertools import chain, islice
from typing import TypeAlias

from .sequence import SequenceState
from .tenants import Entry, LeastServed, Tenant, Tenants

Rank: TypeAlias = tuple[int, int]  # (service class, priority); lower ranks run first


class _Class:
    """The waiting sequences of one rank: a line for each tenant, in the order of arrival."""

    def __init__(self) -> None:
        self.lines: dict[Tenant, list[SequenceState]] = {}
        self.tenants = LeastServed()


class FairQueue:
    """Waiting sequences: by rank, then by how little their tenants have used, then by arrival."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self._classes: dict[Rank, _Class] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[SequenceState]:
        """Iterate over all waiting sequences by rank."""
        for rank in sorted(self._classes):
            yield from chain.from_iterable(self._classes[rank].lines.values())

    @property
    def classes(self) -> set[int]:
        """Return the service classes of waiting sequences."""
        return {rank[0] for rank in self._classes}

    @property
    def num_tenants(self) -> int:
        """How many tenants wait."""
        if len(self._classes) == 1:
            return len(next(iter(self._classes.values())).lines)
        return len({tenant for one in self._classes.values() for tenant in one.lines})

    def admit(self, sequence: SequenceState) -> None:
        """Register a new sequence of the engine before it waits; ``forget`` it when it ends."""
        request = sequence.request
        sequence.tenant = self.tenants.of(request.tenant, request.service_class)
        sequence.tenant.num_unfinished += 1

    def forget(self, sequence: SequenceState) -> None:
        """Note the end of a sequence that was admitted."""
        sequence.tenant.num_unfinished -= 1

    def add(self, sequence: SequenceState, *, again: bool = False) -> None:
        """Let a sequence wait, in its place by arrival. ``again``: it has run before, so its tenant was not idle."""
        tenant = sequence.tenant
        if not tenant.num_waiting and not again:
            self.tenants.lift(tenant, self._lowest(sequence.arrival[0]))
        tenant.num_waiting += 1
        self._num += 1
        place = self._classes.setdefault(sequence.arrival[:2], _Class())
        insort(place.lines.setdefault(tenant, []), sequence, key=_arrival)
        place.tenants.push(tenant)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out of the queue. Raises ``ValueError`` if it did not wait."""
        tenant, rank = sequence.tenant, sequence.arrival[:2]
        place = self._classes[rank]
        line = place.lines[tenant]
        line.remove(sequence)
        tenant.num_waiting -= 1
        self._num -= 1
        if not tenant.num_waiting:
            self.tenants.left(tenant)
        if not line:
            del place.lines[tenant]
            place.tenants.discard(tenant)
            if not place.lines:
                del self._classes[rank]

    def front(self, classes: range, maximum: int) -> list[SequenceState]:
        """Return up to ``maximum`` sequences of ``classes`` in the order of their turns, as if each were to start."""
        found: list[SequenceState] = []
        for rank in sorted(rank for rank in self._classes if rank[0] in classes):
            place = self._classes[rank]
            if len(place.lines) == 1:
                found += islice(next(iter(place.lines.values())), maximum - len(found))
            else:
                found += _turns(place, maximum - len(found))
            if len(found) >= maximum:
                break
        return found

    def _lowest(self, service_class: int) -> Tenant | None:
        lowest = [one.tenants.lowest for rank, one in self._classes.items() if rank[0] == service_class]
        return min((one for one in lowest if one is not None), key=lambda one: one.used, default=None)


def _turns(place: _Class, maximum: int) -> list[SequenceState]:
    """Return the next ``maximum`` sequences of several tenants, allowing for what starting each will cost. Changes
    nothing."""
    found: list[SequenceState] = []
    heads: list[tuple[float, int, Tenant, int]] = []  # use after those found, turn, tenant, how many of it are found
    seen: list[Entry] = []
    while len(found) < maximum:
        lowest = place.tenants.lowest
        if lowest is not None and (not heads or lowest.used < heads[0][0]) and (entry := place.tenants.pop()):
            used, turn, tenant, taken = entry[0], len(seen), lowest, 0
            seen.append(entry)
        elif heads:
            used, turn, tenant, taken = heapq.heappop(heads)
        else:
            break
        line = place.lines[tenant]
        sequence = line[taken]
        found.append(sequence)
        if taken + 1 < len(line):
            heapq.heappush(heads, (used + sequence.start_cost, turn, tenant, taken + 1))
    for entry in seen:
        place.tenants.restore(entry)
    return found


def _arrival(sequence: SequenceState) -> tuple[int, int, int, int]:
    return sequence.arrival
