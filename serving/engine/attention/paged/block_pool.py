"""The accounts of KV blocks: reference counts, and the whole blocks that the prefix cache knows by their tokens.

A block is free, referenced by running sequences (``ref_count``), or idle: cached, unreferenced, and evicted in LRU
order when memory is needed. Cached blocks form a tree, so that a lookup compares tokens instead of hashes::

    PrefixKey ── [the quick brown] ── [fox jumps over] ── …
              └─ [the quick red  ] ── …                       a child is found by its tokens under its parent
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..kv_cache import PrefixKey, TokenIds
from ..slot_table import common_prefix

Parent = PrefixKey | int  # the root of a tree, or the node of the previous block
MAX_CANDIDATES = 32  # children compared to find one with a common beginning
PADDING = 0  # the block that no sequence has; rows that pad a step write there


@dataclass(slots=True, eq=False)
class Block:
    """A block of KV memory. ``tokens``, ``parent`` and ``node`` (a number that is never reused) are set while it is
    cached."""

    index: int
    ref_count: int = 0
    key: PrefixKey | None = None
    parent: Parent | None = None
    tokens: bytes = b""
    node: int = 0

    @property
    def is_cached(self) -> bool:
        return self.parent is not None


class BlockPool:
    """A pool of ``num_blocks`` blocks, numbered from 1. A small model in much memory has millions of them, so that a
    block is only entered on first use."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[Block] = []
        self._free: list[Block] = []
        self._idle: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._children: dict[Parent, dict[bytes, Block]] = {}
        self._last_node = 0

    @property
    def num_available(self) -> int:
        """Return the number of free blocks and of those that can be evicted."""
        return self.num_blocks - self.num_used + len(self._idle)

    @property
    def num_used(self) -> int:
        """Return the number of referenced and idle blocks."""
        return len(self.blocks) - len(self._free)

    def can_allocate(self, count: int, kept: Iterable[Block] = ()) -> bool:
        """Return whether ``count`` blocks can be allocated without evicting ``kept``."""
        return count <= self.num_available - sum(block.ref_count == 0 for block in kept)

    def allocate(self) -> Block:
        """Allocate a block with one reference, evicting an idle one if necessary. Raises ``RuntimeError`` if none is
        left; ask ``can_allocate`` first."""
        if self._free:
            block = self._free.pop()
        elif len(self.blocks) < self.num_blocks:
            block = Block(len(self.blocks) + 1)
            self.blocks.append(block)
        elif self._idle:
            self._evict(next(iter(self._idle.values())))
            block = self._free.pop()
        else:
            raise RuntimeError("KV cache: no block is left")
        block.ref_count = 1
        return block

    def incref(self, block: Block) -> None:
        """Add a reference to a cached block."""
        self._idle.pop(block.index, None)
        block.ref_count += 1

    def free(self, blocks: Iterable[Block], *, keep: bool = True) -> None:
        """Release a reference to each of a sequence's ``blocks``. With ``keep``, cached ones stay for reuse; later
        blocks are evicted before earlier ones, through which they are found."""
        for block in reversed(list(blocks)):
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.is_cached:
                self._idle[block.index] = block
                if not keep:
                    self._evict(block)
            else:
                self._free.append(block)

    def cache_block(self, block: Block, key: PrefixKey, parent: Parent, tokens: TokenIds) -> Block:
        """Enter a whole, valid block into the prefix cache. Return the cached block for these tokens, which may be
        another one."""
        name = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        siblings = self._children.setdefault(parent, {})
        cached = siblings.get(name)
        if cached is not None or block.is_cached:
            return cached or block
        self._last_node += 1
        block.key, block.parent, block.tokens, block.node = key, parent, name, self._last_node
        siblings[name] = block
        return block

    def find(self, parent: Parent, tokens: TokenIds) -> Block | None:
        """Return the cached block with exactly these tokens after ``parent``."""
        siblings = self._children.get(parent)
        if siblings is None:
            return None
        return siblings.get(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())

    def find_partial(self, parent: Parent, tokens: TokenIds) -> tuple[int, Block | None]:
        """Return the cached block after ``parent`` that shares most leading tokens with ``tokens``, and how many it
        shares."""
        best, found = 0, None
        for _, block in zip(range(MAX_CANDIDATES), self._children.get(parent, {}).values(), strict=False):
            common = common_prefix(np.frombuffer(block.tokens, dtype=np.int32), tokens)
            if common > best:
                best, found = common, block
        return best, found

    def uncache(self, block: Block) -> None:
        """Remove a referenced block from the prefix cache."""
        if block.parent is None:
            return
        siblings = self._children[block.parent]
        del siblings[block.tokens]
        if not siblings:
            del self._children[block.parent]
        block.key, block.parent, block.tokens, block.node = None, None, b"", 0

    def evict_adapter(self, adapter: str) -> None:
        """Free the idle blocks of an adapter."""
        for block in [one for one in self._idle.values() if one.key is not None and one.key.adapter == adapter]:
            self._evict(block)

    def _evict(self, block: Block) -> None:
        del self._idle[block.index]
        self.uncache(block)
        self._free.append(block)

    def check_invariants(self, tables: Iterable[Iterable[Block]]) -> list[str]:
        """Return the inconsistencies found, given the block ``tables`` of all sequences."""
        references: dict[int, int] = {}
        for table in tables:
            for block in table:
                references[block.index] = references.get(block.index, 0) + 1
        free = {block.index for block in self._free}
        problems = []
        if (
            len(free) != len(self._free)
            or free & set(self._idle)
            or free & set(references)
            or set(references) & set(self._idle)
        ):
            problems.append("a block is in two states")
        if len(free) + len(self._idle) + len(references) != len(self.blocks) or len(self.blocks) > self.num_blocks:
            problems.append(
                f"{len(free)} free, {len(self._idle)} idle, {len(references)} referenced of {len(self.blocks)}"
            )
        for block in self.blocks:
            if block.ref_count != references.get(block.index, 0):
                problems.append(
                    f"block {block.index} has {references.get(block.index, 0)} references, not {block.ref_count}"
                )
            if block.is_cached != (block.parent is not None and self._children[block.parent][block.tokens] is block):
                problems.append(f"block {block.index} is not in the tree under its own tokens")
            if block.index in free and block.is_cached:
                problems.append(f"block {block.index} is free and cached")
        if sum(map(len, self._children.values())) != sum(block.is_cached for block in self.blocks):
            problems.append("the tree differs from the cached blocks")
        return problems
