"""KV in contiguous slots: one slot per sequence, as long as the model's context.

::

    slab   [ slot 0                                    | slot 1 … | slot n-1 ]      each slot a whole number of pages
    slot   [ layer 0: K [Hkv, S, D] , V [Hkv, S, D] | layer 1 … | unused ]

A native step may store tokens in blocks with a layout of its own (``block``), which are then copied as a whole. They
may end with a scale for each token's key, or value, as wide as ``scale`` elements.

A sequence that begins like another copies its KV or, with ``by_reference``, reads whole blocks of it in place
(``slot_table``) and copies only the rest, if the step supports reading several slots.

Contiguity lets one attention call read the KV of many sequences in place (a strided view over a range of slots). On CPU
the unused part of a slot costs no memory, see ``slab``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .kv_cache import KVCache, LayerShape, PrefixKey, Row, TokenIds
from .slab import PAGE, Slab
from .slot_attention import LayerViews, SlotPlan
from .slot_table import Match, Part, Slot, SlotTable

MAX_MOVES = 2  # slots moved in one step: bounds the cost of making decodes contiguous
SLOT_ALIGNMENT_TOKENS = 64  # keeps rows of a slot aligned to cache lines
NO_READS: Mapping[Slot, int] = {}
BF16_LAYOUT: Mapping[str, Any] = {"dtype": torch.bfloat16, "block": 32}  # as in native/tile_attention.h
INT8_LAYOUT: Mapping[str, Any] = {"dtype": torch.int8, "block": 64, "scale": 4}  # as in native/int8_attention.h


class SlotKVCache(KVCache):
    """A KV cache in slots. ``num_tokens`` is the budget; ``num_slots`` bounds running sequences and cached prefixes
    together."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_slots: int,
        num_tokens: int,
        max_model_len: int,
        dtype: Any,
        device: Any = "cpu",
        prefix_caching: bool = True,
        block: int = 1,
        scale: int = 0,
        by_reference: bool = False,
    ) -> None:
        layers = [_with_scales(shape, scale) for shape in layers]
        self.num_tokens_total = num_tokens
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = device
        self.prefix_caching = prefix_caching
        self.by_reference = by_reference
        self.table = SlotTable(num_slots, num_tokens)
        self._slot_tokens = -(-max_model_len // SLOT_ALIGNMENT_TOKENS) * SLOT_ALIGNMENT_TOKENS
        self._slot_elements = slot_elements(layers, self._slot_tokens, dtype)
        self.slab = Slab(self._slot_elements * num_slots, dtype, device)
        self.layers: list[LayerViews] = []
        offset = 0
        for shape in layers:
            views = LayerViews.of(self.slab.tensor, shape, num_slots, self._slot_elements, offset, self, block)
            self.layers.append(views)
            offset += shape.elements_per_token * self._slot_tokens

    @property
    def slot_tokens(self) -> int:
        """Return the capacity of a slot in tokens."""
        return self._slot_tokens

    @property
    def slot_elements(self) -> int:
        """Return the stride between slots in elements."""
        return self._slot_elements

    @property
    def layer_offsets(self) -> list[int]:
        """Return where each layer's keys begin in a slot, in elements; its values follow them."""
        return [views.offset for views in self.layers]

    @property
    def slab_address(self) -> int:
        """Return the address of the first slot."""
        return int(self.slab.tensor.data_ptr())

    def slot_of(self, owner: int) -> Slot:
        """Return the slot of a running sequence."""
        return self.table.by_owner[owner]

    @property
    def num_tokens_used(self) -> int:
        return self.table.used

    def match(self, key: PrefixKey, tokens: TokenIds) -> tuple[int, int | None]:
        if not self.prefix_caching:
            return 0, None
        found = self.table.best_match(key, tokens)
        return found.length, found.wait_for

    def acquire(
        self,
        owner: int,
        key: PrefixKey,
        tokens: TokenIds,
        *,
        at_most: int | None = None,
        source: int | None = None,
        fixed: int | None = None,
    ) -> int | None:
        if source is not None:
            found = self.table.match_running(source, tokens)
        else:
            found = self.table.best_match(key, tokens, at_most) if self.prefix_caching else Match(0, None, None)
        slot, length = found.source, found.length
        if slot is not None and length:
            if self._can_continue_in(slot, length, fixed) and self._should_take_over(slot, length, len(tokens)):
                if not self._evict_until_fits(len(tokens) - slot.room, {slot: slot.room, **dict(slot.parts)}):
                    return None
                self._trim(slot, len(tokens))
                self.table.activate(slot, owner, key, tokens, length, fixed)
                return length
            fresh = self._slot_like(slot, length, len(tokens), fixed)
            if fresh is not None:
                self.table.activate(fresh, owner, key, tokens, length, fixed)
                return length
        fresh = self._fresh_slot(len(tokens), {})
        if fresh is None:
            return None
        self.table.activate(fresh, owner, key, tokens, 0, fixed)
        return 0

    def _can_continue_in(self, slot: Slot, length: int, fixed: int | None) -> bool:
        """Return whether a sequence can continue in the idle slot itself: nobody reads what it would overwrite."""
        written_from = length if fixed is None else min(length, fixed)
        return slot.is_idle and slot.shared <= written_from and slot.lent_until <= written_from

    def _should_take_over(self, source: Slot, length: int, needed: int) -> bool:
        """Return whether to continue in the idle slot itself: if little else is lost by that, or there is no room for a
        copy."""
        if 4 * length >= 3 * source.length or self.table.lowest_free() is None:
            return True
        return self.table.used + needed > self.num_tokens_total

    def _slot_like(self, source: Slot, length: int, num_tokens: int, fixed: int | None) -> Slot | None:
        """Return a slot for ``num_tokens`` that begins with the first ``length`` of ``source``; None if there is no
        room for it."""
        parts: tuple[Part, ...] = ()
        if self.by_reference:
            written_once = min(length, source.fixed, length if fixed is None else fixed)
            parts = self.table.parts_of(source, written_once)
        shared = parts[-1].stop if parts else 0
        reads = {slot: stop for slot, _, stop in source.ranges(0, length)}
        copied = list(source.ranges(shared, length))  # the source itself may be evicted if these lie in other slots
        for one, stop in reads.items():
            one.lent.append(stop)
        slot = self._fresh_slot(num_tokens - shared, reads)
        if slot is not None:
            self.table.share(slot, parts)
            self._copy(copied, slot)
        for one, stop in reads.items():
            one.lent.remove(stop)
            self._clear_unread(one)
        return slot

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        to = self.slot_of(target)
        assert to.shared <= start, "shared tokens are never written"
        self._copy(self.slot_of(source).ranges(start, stop), to)

    def _copy(self, ranges: Iterable[tuple[Slot, int, int]], target: Slot) -> None:
        for slot, start, stop in ranges:
            for layer in self.layers:
                layer.copy(slot.index, target.index, start, stop)

    def _fresh_slot(self, num_tokens: int, reads: Mapping[Slot, int]) -> Slot | None:
        if not self._evict_until_fits(num_tokens, reads):
            return None
        slot = self.table.lowest_free()
        if slot is None:
            idle = self.table.evictable(self.table.needed(reads))
            if not idle:
                return None
            slot = idle[0]
            self._clear(slot)
        return slot

    def _evict_until_fits(self, extra: int, reads: Mapping[Slot, int] = NO_READS) -> bool:
        """Evict idle slots until ``extra`` more tokens fit and, if that is not enough, cut unread tokens from other
        slots; evict nothing if even that would not be enough. ``reads``: tokens that must be kept in which slots."""
        missing = self.table.used + extra - self.num_tokens_total
        if missing <= 0:
            return True
        needed = self.table.needed(reads)
        idle = self.table.evictable(needed)
        keep = {slot: max(stop, slot.shared) for slot, stop in needed.items()}
        if sum(s.charged for s in idle) + sum(slot.room - stop for slot, stop in keep.items()) < missing:
            return False
        enough = self.num_tokens_total - extra
        for slot in idle:
            if self.table.used <= enough:
                return True
            if not slot.is_free:  # it was freed with its last reader
                self._clear(slot)
        for slot, stop in keep.items():
            if self.table.used > enough:
                self._cut(slot, stop)
        return True

    def grow(self, owner: int, num_tokens: int) -> bool:
        slot = self.table.by_owner[owner]
        if num_tokens > slot.room:
            if not self._evict_until_fits(num_tokens - slot.room):
                return False
            self.table.charge(slot, num_tokens)
        return True

    def computed(self, owner: int, tokens: TokenIds, length: int) -> None:
        slot = self.table.by_owner[owner]
        slot.tokens, slot.length = tokens, length

    def release(self, owner: int, *, keep: bool) -> None:
        slot = self.table.retire(owner)
        keep = keep and self.prefix_caching
        num_tokens = max(slot.length if keep else 0, slot.lent_until)
        if num_tokens <= slot.shared:
            self._clear(slot)
            return
        self._cut(slot, num_tokens)
        if not keep:
            self.table.hide(slot)

    def wipe(self, owner: int) -> None:
        """See ``KVCache.wipe``. Tokens that others read in its slot are left for them to wipe; the slot is removed from
        lookup."""
        slot = self.table.by_owner[owner]
        start, kept = slot.index * self._slot_elements, slot.lent_until
        for layer in self.layers:
            for first, last in layer.tails(kept, self._slot_tokens):
                self.slab.tensor[start + first : start + last].zero_()
        self.table.hide(slot)

    def forget(self, adapter: str) -> None:
        idle = [s for s in self.table.slots if s.is_idle and s.key is not None and s.key.adapter == adapter]
        for slot in sorted(idle, key=lambda slot: -slot.shared):  # readers before the slots that they read
            if slot.lent:
                self.table.hide(slot)
                self._cut(slot, slot.lent_until)
            else:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        start = slot.index * self._slot_elements
        self.slab.release(start, start + self._slot_elements)
        read = {part.slot for part in slot.parts}
        self.table.clear(slot)
        for other in read:
            self._clear_unread(other)

    def _clear_unread(self, slot: Slot) -> None:
        """Clear a slot that was kept only for its readers, once there are none."""
        if slot.is_idle and not slot.lent and not slot.length:
            self._clear(slot)

    def _cut(self, slot: Slot, num_tokens: int) -> None:
        """Release the tokens of an idle slot after the first ``num_tokens``."""
        self._trim(slot, num_tokens)
        self.table.cut(slot, num_tokens)

    def _trim(self, slot: Slot, num_tokens: int) -> None:
        """Return the memory after the first ``num_tokens`` tokens to the system."""
        if slot.room <= num_tokens:
            return
        start = slot.index * self._slot_elements
        for layer in self.layers:
            for first, last in layer.tails(num_tokens, slot.room):
                self.slab.release(start + first, start + last)

    def decode_order(self, owners: Sequence[int]) -> list[int]:
        by_owner = self.table.by_owner
        if len(owners) > 1 and not self.by_reference:
            self._gather([by_owner[o] for o in owners])
        return sorted(owners, key=lambda o: by_owner[o].index)

    def _gather(self, slots: list[Slot]) -> None:
        """Move a few slots so that those decoding are adjacent and one attention call reads them all."""
        inside = sorted(s.index for s in slots)
        n = len(inside)
        if inside[-1] - inside[0] + 1 == n:
            return
        # Take the window of n slots that already holds most of them, and move the others into its holes.
        first = max(range(min(inside[-1] - n + 2, len(self.table.slots) - n + 1)), key=lambda i: _within(inside, i, n))
        taken = set(inside)
        holes = [i for i in range(first, first + n) if i not in taken]
        outside = [i for i in inside if not first <= i < first + n]
        for hole, index in list(zip(holes, reversed(outside), strict=True))[:MAX_MOVES]:
            self._swap(self.table.slots[index], self.table.slots[hole])

    def _swap(self, a: Slot, b: Slot) -> None:
        for layer in self.layers:
            layer.swap(a.index, b.index, a.length, b.length)
        self.table.swap(a, b)

    def plan(self, rows: Sequence[Row]) -> SlotPlan:
        assert not self.by_reference, "a SlotPlan only reads a sequence's own slot"
        slots = [self.slot_of(row.owner).index for row in rows]
        return SlotPlan(self.layers, self._slot_tokens, rows, slots, self.device)

    def check_integrity(self) -> None:
        self.table.check_integrity()

    def close(self) -> None:
        self.layers.clear()


def token_bytes(layers: Sequence[LayerShape], *, dtype: Any, block: int = 1, scale: int = 0) -> int:
    """Return the bytes of a token's keys and values in a cache with this layout."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    return sum(_with_scales(shape, scale).elements_per_token for shape in layers) * itemsize


def _with_scales(shape: LayerShape, scale: int) -> LayerShape:
    return replace(shape, key_dim=shape.key_dim + scale, value_dim=shape.value_dim + scale)


def slot_elements(layers: Sequence[LayerShape], slot_tokens: int, dtype: Any) -> int:
    """Return the elements of a slot: a whole number of pages, and of rows of every head width (so that rows can be
    indexed)."""
    unit = PAGE // torch.empty((), dtype=dtype).element_size()
    for shape in layers:
        unit = math.lcm(unit, shape.key_dim, shape.value_dim)
    return -(-sum(s.elements_per_token for s in layers) * slot_tokens // unit) * unit


def _within(inside: list[int], first: int, n: int) -> int:
    return sum(1 for i in inside if first <= i < first + n)
