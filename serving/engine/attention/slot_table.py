"""The accounts of KV slots: the owner of each, the tokens whose KV it holds, and how much memory that takes.

A slot is free (empty), active (owned by a running sequence) or idle (its sequence has ended, its KV can be reused). The
legal transitions are free → active → idle → active, and active or idle → free.

If the attention supports it, a sequence that begins like another shares whole blocks with it: they stay in the slot in
which they were written, at the same positions, and its own slot begins after them::

    slot 0   [ system prompt ████ | its own ██ ]        lent [128, 128]
    slot 1   [ parts: slot 0, 128 | its own ███ ]       charged for the tokens after 128
    slot 2   [ parts: slot 0, 128 | its own █ ]

A slot that others read may be retired and reused after the tokens that they read; it is not free until the last of them
is gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .kv_cache import PrefixKey, TokenIds

EMPTY: TokenIds = np.empty(0, dtype=np.int32)
MIN_REUSED_TOKENS = 8  # copying fewer tokens costs more than computing them again
SHARED_BLOCK_TOKENS = 64  # as in native/attention.h
MAX_SHARED_SLOTS = 2  # other slots that a sequence reads; each may be unavailable to others meanwhile
MIN_AWAITED_TOKENS = 32  # additional tokens that a running sequence must be computing for a prompt to wait for it


class Part(NamedTuple):
    """The tokens before ``stop``, and not before the previous part's, which lie in ``slot``."""

    slot: Slot
    stop: int


@dataclass(slots=True, eq=False)
class Slot:
    """The account of one slot.

    ``tokens`` are those that it holds or, while active, will hold; the KV of the first ``length`` is valid.
    ``charged``: tokens of memory it is charged for, those after its ``parts``. ``lent``: for each reader, the position
    before which it reads. Tokens from ``fixed`` on may be overwritten, by a search that drops a beam."""

    index: int
    key: PrefixKey | None = None
    owner: int | None = None
    tokens: TokenIds = field(default_factory=lambda: EMPTY)
    length: int = 0
    charged: int = 0
    last_used: int = 0
    parts: tuple[Part, ...] = ()
    lent: list[int] = field(default_factory=list)
    fixed: int = sys.maxsize

    @property
    def shared(self) -> int:
        """Return how many of its first tokens lie in other slots."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def room(self) -> int:
        """Return how many tokens there is memory for, including shared ones."""
        return self.shared + self.charged

    @property
    def lent_until(self) -> int:
        """Return the position after the last token that others read in it."""
        return max(self.lent, default=0)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[Slot, int, int]]:
        """Yield where its tokens ``[start, stop)`` lie: slots, and the range of tokens in each."""
        for slot, end in (*self.parts, Part(self, stop)):
            if start < min(end, stop):
                yield slot, start, min(end, stop)
                start = min(end, stop)

    @property
    def is_idle(self) -> bool:
        """Return whether it is kept for reuse, without a running sequence."""
        return self.owner is None and self.charged > 0

    @property
    def is_free(self) -> bool:
        """Return whether it is empty."""
        return self.owner is None and self.charged == 0


@dataclass(frozen=True, slots=True)
class Match:
    """The best prefix available now, and the running sequence whose prompt shares more than that, if any."""

    length: int
    source: Slot | None
    wait_for: int | None


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Return the number of leading tokens that are equal."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    different = a[:n] != b[:n]
    first = int(different.argmax())
    return first if different[first] else n


class SlotTable:
    """The slots, which share a budget of ``num_tokens``.

    Prefixes are looked up by key first (``_by_key``), so that tokens are never compared across adapters or salts."""

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.slots = [Slot(i) for i in range(num_slots)]
        self.num_tokens = num_tokens
        self.used = 0
        self.by_owner: dict[int, Slot] = {}
        self._by_key: dict[PrefixKey, list[Slot]] = {}
        self._clock = 0

    def best_match(self, key: PrefixKey, tokens: TokenIds, at_most: int | None = None) -> Match:
        """Find the best prefix under ``key``, of at most ``at_most`` tokens.

        At most ``len(tokens) - 1`` tokens match, since the last one must be computed to have logits."""
        best, source, promised, wait_for = 0, None, 0, None
        limit = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        for slot in self._by_key.get(key, ()):
            if not len(slot.tokens):
                continue
            common = min(common_prefix(slot.tokens, tokens), limit)
            valid = min(common, slot.length)
            if valid > best or (valid == best and valid > 0 and slot.is_idle):
                best, source = valid, slot
            if slot.owner is not None and common > max(promised, slot.length):
                promised, wait_for = common, slot.owner
        if promised < best + MIN_AWAITED_TOKENS and promised < limit:
            wait_for = None
        if promised <= best:
            wait_for = None
        return Match(best if best >= min(MIN_REUSED_TOKENS, limit) else 0, source, wait_for)

    def match_running(self, owner: int, tokens: TokenIds) -> Match:
        """Return the common prefix of ``tokens`` and the running sequence ``owner``, whatever its key."""
        slot = self.by_owner[owner]
        return Match(min(common_prefix(slot.tokens, tokens), slot.length, len(tokens) - 1), slot, None)

    def parts_of(self, source: Slot, length: int) -> tuple[Part, ...]:
        """Return the parts that can replace the first ``length`` tokens of ``source``: whole blocks, in few slots."""
        whole = length // SHARED_BLOCK_TOKENS * SHARED_BLOCK_TOKENS
        ranges = list(source.ranges(0, whole))
        return tuple(Part(slot, stop) for slot, _, stop in ranges[:MAX_SHARED_SLOTS])

    def needed(self, reads: Mapping[Slot, int]) -> dict[Slot, int]:
        """Return how many tokens of which idle slots are read by running sequences, or according to ``reads``."""
        found = dict(reads)
        for active in self.by_owner.values():
            for slot, stop in active.parts:
                found[slot] = max(found.get(slot, 0), stop)
        return {slot: stop for slot, stop in found.items() if slot.owner is None}

    def evictable(self, needed: Mapping[Slot, int]) -> list[Slot]:
        """Return the idle slots that are not ``needed``, least recently used first, readers before the slots that they
        read."""
        idle = [slot for slot in self.slots if slot.is_idle and slot not in needed]
        used = {slot: slot.last_used for slot in idle}
        for slot in idle:
            for part in slot.parts:
                if part.slot in used:
                    used[part.slot] = max(used[part.slot], slot.last_used)
        return sorted(idle, key=lambda slot: (used[slot], -slot.shared))

    def lowest_free(self) -> Slot | None:
        """Return the free slot with the lowest index; None if there is none."""
        return next((s for s in self.slots if s.is_free), None)

    def charge(self, slot: Slot, num_tokens: int) -> None:
        """Charge ``slot`` for ``num_tokens`` tokens instead of its current charge; shared tokens are charged where they
        lie."""
        own = max(num_tokens - slot.shared, 0)
        self.used += own - slot.charged
        slot.charged = own

    def share(self, slot: Slot, parts: tuple[Part, ...]) -> None:
        """Make a free slot begin with ``parts``."""
        slot.parts = parts
        for part in parts:
            part.slot.lent.append(part.stop)

    def activate(
        self, slot: Slot, owner: int, key: PrefixKey, tokens: TokenIds, length: int, fixed: int | None = None
    ) -> None:
        """Activate a free or idle slot, in which the first ``length`` of ``tokens`` are valid. Raises ``RuntimeError``
        for a slot or owner in use."""
        if slot.owner is not None or owner in self.by_owner:
            raise RuntimeError(f"slot {slot.index} cannot be given to sequence {owner}")
        self._file(slot, key)
        slot.owner, slot.tokens, slot.length = owner, tokens, length
        slot.fixed = sys.maxsize if fixed is None else fixed
        self.charge(slot, max(len(tokens), 1))
        self.by_owner[owner] = slot

    def retire(self, owner: int) -> Slot:
        """Make the slot of ``owner`` idle; tokens that are not valid are forgotten."""
        slot = self.by_owner.pop(owner)
        self._clock += 1
        slot.owner, slot.last_used, slot.fixed = None, self._clock, sys.maxsize
        slot.tokens = slot.tokens[: slot.length].copy()
        return slot

    def cut(self, slot: Slot, num_tokens: int) -> None:
        """Truncate an idle slot to at most ``num_tokens``."""
        slot.length = min(slot.length, num_tokens)
        slot.tokens = slot.tokens[: slot.length]
        self.charge(slot, num_tokens)

    def hide(self, slot: Slot) -> None:
        """Remove the slot from prefix lookup; current readers are unaffected."""
        slot.tokens, slot.length = EMPTY, 0
        if slot.owner is None:
            self._file(slot, None)

    def clear(self, slot: Slot) -> None:
        """Free an idle slot. Raises ``RuntimeError`` for a slot in use."""
        if slot.owner is not None or slot.lent:
            raise RuntimeError(f"slot {slot.index} is in use")
        for part in slot.parts:
            part.slot.lent.remove(part.stop)
        slot.parts = ()
        self.charge(slot, 0)
        self._file(slot, None)
        slot.tokens, slot.length = EMPTY, 0

    def _file(self, slot: Slot, key: PrefixKey | None) -> None:
        """Index ``slot`` under ``key``; with None, remove it from the index."""
        if slot.key == key:
            return
        if slot.key is not None:
            left = [other for other in self._by_key.pop(slot.key) if other is not slot]
            if left:
                self._by_key[slot.key] = left
        if key is not None:
            self._by_key.setdefault(key, []).append(slot)
        slot.key = key

    def swap(self, a: Slot, b: Slot) -> None:
        """Exchange the places of two slots whose KV has been exchanged."""
        a.index, b.index = b.index, a.index
        self.slots[a.index], self.slots[b.index] = a, b

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if the accounts are inconsistent."""
        problems = []
        if self.used != sum(s.charged for s in self.slots) or not 0 <= self.used <= self.num_tokens:
            problems.append(f"used is {self.used}, charged {[s.charged for s in self.slots]} of {self.num_tokens}")
        owned = {s.owner: s for s in self.slots if s.owner is not None}
        if owned != self.by_owner:
            problems.append(f"owners {sorted(owned)} but the index has {sorted(self.by_owner)}")
        filed = {id(slot): key for key, slots in self._by_key.items() for slot in slots}
        if filed != {id(slot): slot.key for slot in self.slots if slot.key is not None}:
            problems.append("the index of keys differs from the slots")
        lent: dict[Slot, list[int]] = {slot: [] for slot in self.slots}
        for slot in self.slots:
            for part in slot.parts:
                lent[part.slot].append(part.stop)
        for i, slot in enumerate(self.slots):
            lends = slot.lent_until <= slot.room and sorted(lent[slot]) == sorted(slot.lent)
            held = slot.length or slot.key or slot.parts or slot.lent
            if slot.index != i or slot.length > slot.room or not lends or (slot.is_free and held):
                problems.append(f"slot {i}: {slot}")
        if problems:
            raise RuntimeError("KV cache: " + "; ".join(problems))
