"""The choice of adapters that are evicted to make room for others, fairly between their owners.

Each tenant, for the adapters that came with its requests, and the named adapters together are entitled to an equal
share. No owner starves another by loading more than its share.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """An adapter as eviction sees it. ``owner`` is the tenant, None for named adapters. ``last_used`` grows with
    time."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def owner(self) -> Hashable: ...


A = TypeVar("A", bound=Evictable)


def held_by(adapters: Iterable[Evictable]) -> dict[Hashable, int]:
    """Return the bytes held by each owner."""
    held: dict[Hashable, int] = {}
    for one in adapters:
        held[one.owner] = held.get(one.owner, 0) + one.num_bytes
    return held


def choose(
    idle: Collection[A], held: Mapping[Hashable, int], owner: Hashable, extra: int, *, room: int
) -> list[A] | None:
    """Choose which of ``idle`` to evict from ``room`` bytes so that ``owner`` can have ``extra`` bytes more.

    Returns None if evicting all of them would not be enough. ``held`` maps owners to their bytes, in use or not.
    Adapters of owners that hold more than their share go first, the longest unused first. If nobody holds more than
    its share, the longest unused of all goes. But if ``owner`` already holds something and would then exceed its own
    share, only its own adapters and those of owners above their share go.
    """
    left = {owner: 0, **held}
    share = room / len(left)
    is_over = left[owner] > 0 and left[owner] + extra > share
    waiting = sorted(idle, key=lambda one: one.last_used)
    chosen: list[A] = []
    while sum(left.values()) + extra > room:
        due = (one for one in waiting if left[one.owner] > share or (is_over and one.owner == owner))
        one = next(due, None) or (waiting[0] if waiting and not is_over else None)
        if one is None:
            return None
        waiting.remove(one)
        chosen.append(one)
        left[one.owner] -= one.num_bytes
    return chosen
