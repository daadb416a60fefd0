"""Copies, in the host's memory, of adapters that were evicted from a device.

Named adapters come back from them without reading the disk. LoRA tasks, whose weights came with requests, could not
come back without them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .eviction import choose, held_by

Weights = TypeVar("Weights")


@dataclass(frozen=True, slots=True, eq=False)
class _Copy(Generic[Weights]):
    key: str
    owner: Hashable
    num_bytes: int
    last_used: int
    weights: Weights


class HostCopies(Generic[Weights]):
    """The copies within ``budget`` bytes, which owners share in the same way as the device's (``adapter_room``). A copy
    that came later counts as used later."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._copies: dict[str, _Copy[Weights]] = {}
        self._made = 0

    def __contains__(self, key: str) -> bool:
        return key in self._copies

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether a copy of this size can be kept at all."""
        return num_bytes <= self._budget

    def keep(self, key: str, owner: Hashable, num_bytes: int, weights: Weights) -> list[str]:
        """Keep a copy. Return the keys of the copies dropped for it, or its own if there is no room for it."""
        held = held_by(self._copies.values())
        gone = choose(self._copies.values(), held, owner, num_bytes, room=self._budget)
        if gone is None:
            return [key]
        for copy in gone:
            del self._copies[copy.key]
        self._made += 1
        self._copies[key] = _Copy(key, owner, num_bytes, self._made, weights)
        return [copy.key for copy in gone]

    def take(self, key: str) -> Weights:
        """Take the weights of ``key`` out, to go back to the device."""
        return self._copies.pop(key).weights

    def drop(self, key: str) -> None:
        self._copies.pop(key, None)
