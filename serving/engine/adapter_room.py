"""Which adapters make room for others, fairly: a tenant's, which came with its requests, and the named ones together
are each entitled to an equal share, and nobody starves another by loading more than that.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """``owner``: the tenant, None for named adapters. ``last_used`` grows with time."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def owner(self) -> Hashable: ...


A = TypeVar("A", bound=Evictable)


def held_by(adapters: Iterable[Evictable]) -> dict[Hashable, int]:
    """Bytes by owner."""
    held: dict[Hashable, int] = {}
    for one in adapters:
        held[one.owner] = held.get(one.owner, 0) + one.num_bytes
    return held


def choose(
    idle: Collection[A], held: Mapping[Hashable, int], owner: Hashable, extra: int, *, room: int
) -> list[A] | None:
    """Those of ``idle`` to evict from ``room`` bytes for ``extra`` more of ``owner``; None where that is not enough.

    ``held``: bytes by owner, in use or not. The longest unused goes first, of those whose owners hold more than their
    share. Where nobody does it is the longest unused of all, unless ``owner`` would then hold more than its share
    itself, and not by its first alone: then only what is its own.
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
