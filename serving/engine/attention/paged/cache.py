"""KV in blocks of a few tokens: each sequence has a block table, and sequences with a common prefix share blocks.

::

    layer      k, v [blocks, block size, Hkv, D]
    sequence   tokens    the quick brown | fox jumps over | the la…
               blocks    7               | 3              | 12          whole blocks may be shared, the last never is

A sequence writes only after the prefix that it took over, so whole blocks are shared by reference and the used part of
a partial block is copied. Block 0 belongs to no sequence (``block_pool.PADDING``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kv_cache import KVCache, LayerShape, PrefixKey, Row, TokenIds
from ..slot_table import EMPTY, MIN_AWAITED_TOKENS, MIN_REUSED_TOKENS, common_prefix
from .block_pool import Block, BlockPool, Parent
from .layer_blocks import LayerBlocks
from .plan import PagedPlan
from .step_tables import StepTables


@dataclass(slots=True)
class BlockTable:
    """The block table of a running sequence. The KV of the first ``length`` of ``tokens`` is valid; ``nodes`` are the
    nodes of its whole blocks in the tree of cached blocks."""

    key: PrefixKey
    tokens: TokenIds
    length: int
    blocks: list[Block] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def parent(self) -> Parent:
        """Return the parent of its next whole block."""
        return self.nodes[-1] if self.nodes else self.key


@dataclass(frozen=True, slots=True)
class Found:
    """A cached prefix of ``length`` tokens: whole ``blocks`` with their ``nodes``, and the first tokens of
    ``partial``."""

    length: int
    blocks: Sequence[Block] = ()
    nodes: Sequence[int] = ()
    partial: Block | None = None


class PagedKVCache(KVCache):
    """A KV cache in blocks of ``block_size`` tokens. ``num_tokens`` is the budget, rounded down to whole blocks."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_tokens: int,
        max_model_len: int,
        dtype: Any,
        block_size: int,
        device: Any = "cpu",
        prefix_caching: bool = True,
    ) -> None:
        num_blocks = num_tokens // block_size
        self.block_size = block_size
        self.num_tokens_total = num_blocks * block_size
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = torch.device(device)
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.layers = [LayerBlocks.of(shape, num_blocks + 1, block_size, dtype, self.device) for shape in layers]
        self.tables: dict[int, BlockTable] = {}

    @property
    def num_tokens_used(self) -> int:
        return self.pool.num_used * self.block_size

    @property
    def blocks_per_sequence(self) -> int:
        """Return the number of blocks of the longest possible sequence."""
        return self.num_blocks(self.max_model_len)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, owner: int) -> list[int]:
        """Return the block table of a running sequence."""
        return [block.index for block in self.tables[owner].blocks]

    def match(self, key: PrefixKey, tokens: TokenIds) -> tuple[int, int | None]:
        if not self.prefix_caching:
            return 0, None
        limit = len(tokens) - 1
        found = self._best(key, tokens, limit).length
        promised, wait_for = 0, None
        for owner, table in self.tables.items():
            if table.key == key:
                common = min(common_prefix(table.tokens, tokens), limit)
                if common > max(promised, table.length):
                    promised, wait_for = common, owner
        if promised <= found or (promised < found + MIN_AWAITED_TOKENS and promised < limit):
            wait_for = None
        return found, wait_for

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
        if owner in self.tables:
            raise RuntimeError(f"sequence {owner} has blocks already")
        limit = max(len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1), 0)
        if source is not None:
            found = self._in_common(self.tables[source], tokens, limit)
        else:
            found = self._best(key, tokens, limit) if self.prefix_caching else Found(0)
        count = self.num_blocks(max(len(tokens), 1)) - len(found.blocks)
        if found.partial is not None and not self.pool.can_allocate(count, [*found.blocks, found.partial]):
            # there is no room to keep the partial block until it is copied
            found = Found(len(found.blocks) * self.block_size, found.blocks, found.nodes)
        if found.partial is None and not self.pool.can_allocate(count, found.blocks):
            return None
        kept = [*found.blocks] if found.partial is None else [*found.blocks, found.partial]
        for block in kept:
            self.pool.incref(block)
        fresh = [self.pool.allocate() for _ in range(count)]
        if found.partial is not None:
            self._copy_block(found.partial, fresh[0])
        self.pool.free(kept[len(found.blocks) :])
        self.tables[owner] = BlockTable(key, tokens, found.length, [*found.blocks, *fresh], list(found.nodes))
        return found.length

    def _best(self, key: PrefixKey, tokens: TokenIds, limit: int) -> Found:
        """Return the longest prefix under ``key``, in cached blocks or in those of a running sequence."""
        found = self._known(key, tokens, limit)
        for table in self.tables.values():
            if table.key == key and table.length > found.length:
                other = self._in_common(table, tokens, limit)
                if other.length > found.length:
                    found = other
        return found if found.length >= min(MIN_REUSED_TOKENS, limit) else Found(0)

    def _known(self, key: PrefixKey, tokens: TokenIds, limit: int) -> Found:
        size, parent = self.block_size, key
        blocks: list[Block] = []
        while (end := (len(blocks) + 1) * size) <= limit:
            block = self.pool.find(parent if not blocks else blocks[-1].node, tokens[end - size : end])
            if block is None:
                break
            blocks.append(block)
        whole = len(blocks) * size
        common, partial = self.pool.find_partial(blocks[-1].node if blocks else parent, tokens[whole:limit])
        return Found(whole + common, blocks, [block.node for block in blocks], partial)

    def _in_common(self, table: BlockTable, tokens: TokenIds, limit: int) -> Found:
        """Return the common prefix of ``tokens`` and a running sequence."""
        length = min(common_prefix(table.tokens, tokens), table.length, limit)
        whole = length // self.block_size
        partial = table.blocks[whole] if length % self.block_size else None
        return Found(length, table.blocks[:whole], table.nodes[:whole], partial)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See ``KVCache.copy``. Whole blocks are shared by reference."""
        origin, to = self.tables[source], self.tables[target]
        first, last = start // self.block_size, stop // self.block_size
        for i in range(first, last):
            self.pool.incref(origin.blocks[i])
            if i < len(to.blocks):
                self.pool.free([to.blocks[i]])
                to.blocks[i] = origin.blocks[i]
            else:
                to.blocks.append(origin.blocks[i])
        if stop % self.block_size:
            self._own(to, last)
            self._copy_block(origin.blocks[last], to.blocks[last])
        to.nodes = origin.nodes[:last]

    def _own(self, table: BlockTable, place: int) -> None:
        """Make the block at ``place`` exclusive to this sequence and uncached, since it is about to be written."""
        if place < len(table.blocks):
            block = table.blocks[place]
            if block.ref_count == 1:
                self.pool.uncache(block)
                return
            table.blocks[place] = self.pool.allocate()
            self.pool.free([block])
        else:
            table.blocks.append(self.pool.allocate())

    def _copy_block(self, source: Block, target: Block) -> None:
        for layer in self.layers:
            layer.copy(source.index, target.index)

    def grow(self, owner: int, num_tokens: int) -> bool:
        blocks = self.tables[owner].blocks
        missing = self.num_blocks(num_tokens) - len(blocks)
        if missing > 0:
            if not self.pool.can_allocate(missing):
                return False
            blocks += [self.pool.allocate() for _ in range(missing)]
        return True

    def computed(self, owner: int, tokens: TokenIds, length: int) -> None:
        table, size = self.tables[owner], self.block_size
        table.tokens, table.length = tokens, length
        if not self.prefix_caching:
            return
        while (end := (len(table.nodes) + 1) * size) <= length:
            block = table.blocks[len(table.nodes)]
            table.nodes.append(self.pool.cache_block(block, table.key, table.parent, tokens[end - size : end]).node)

    def release(self, owner: int, *, keep: bool) -> None:
        self.pool.free(self.tables.pop(owner).blocks, keep=keep)

    def wipe(self, owner: int) -> None:
        """See ``KVCache.wipe``. Shared blocks are left for their other owners to wipe; none of them stays cached."""
        table = self.tables[owner]
        exclusive = [block.index for block in table.blocks if block.ref_count == 1]
        for block in table.blocks:
            self.pool.uncache(block)
        for layer in self.layers:
            layer.zero(exclusive)
        table.tokens, table.length = EMPTY, 0
        table.nodes.clear()

    def forget(self, adapter: str) -> None:
        self.pool.evict_adapter(adapter)

    def plan(self, rows: Sequence[Row]) -> PagedPlan:
        return PagedPlan(self.layers, StepTables.of(rows, self, self.device), self.max_model_len)

    def decode_order(self, owners: Sequence[int]) -> list[int]:
        return list(owners)

    def check_integrity(self) -> None:
        problems = self.pool.check_invariants(table.blocks for table in self.tables.values())
        for owner, table in self.tables.items():
            if len(table.blocks) < self.num_blocks(table.length) or len(table.nodes) > len(table.blocks):
                problems.append(f"sequence {owner} has {len(table.blocks)} blocks for {table.length} tokens")
        if problems:
            raise RuntimeError("KV cache: " + "; ".join(problems))

    def close(self) -> None:
        self.layers.clear()
