"""The blocks' accounts: who holds each, and which whole ones are known by their tokens.

A block is free, held by running sequences (``num_holders``), or idle: known, held by none, and evicted when room is
needed, the longest unused first. Whole blocks are known as a tree, so that a lookup compares tokens and no hashes::

    PrefixKey ── [the quick brown] ── [fox jumps over] ── …
              └─ [the quick red  ] ── …                       a child is found by its own tokens under its parent
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..kv_cache import PrefixKey, TokenIds
from ..slot_table import common_prefix

Parent = PrefixKey | int  # where a tree begins, or the node of the block before
MOST_COMPARED = 32  # children looked through for one that begins alike
PADDING = 0  # the block that no sequence has: what fills up a step's size is written there


@dataclass(slots=True, eq=False)
class Block:
    """``tokens``, ``parent`` and ``node`` (a number never used again) are set while it is known."""

    index: int
    num_holders: int = 0
    key: PrefixKey | None = None
    parent: Parent | None = None
    tokens: bytes = b""
    node: int = 0

    @property
    def is_known(self) -> bool:
        return self.parent is not None


class BlockPool:
    """``num_blocks`` blocks that sequences can have, numbered from 1 on: a small model in much memory has millions, so
    that each is entered with its first use."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[Block] = []
        self._free: list[Block] = []
        self._idle: OrderedDict[int, Block] = OrderedDict()  # the longest unused first
        self._children: dict[Parent, dict[bytes, Block]] = {}
        self._last_node = 0

    @property
    def num_available(self) -> int:
        """Free ones, and those that could be evicted."""
        return self.num_blocks - self.num_used + len(self._idle)

    @property
    def num_used(self) -> int:
        """Held or idle."""
        return len(self.blocks) - len(self._free)

    def could_take(self, count: int, kept: Iterable[Block] = ()) -> bool:
        """Whether ``count`` blocks can be had while ``kept`` are not evicted."""
        return count <= self.num_available - sum(block.num_holders == 0 for block in kept)

    def take(self) -> Block:
        """A block for one holder; evicts. Raises ``RuntimeError`` where none is left: ask ``could_take`` before."""
        if self._free:
            block = self._free.pop()
        elif len(self.blocks) < self.num_blocks:
            block = Block(len(self.blocks) + 1)
            self.blocks.append(block)
        elif self._idle:
            self._forget(next(iter(self._idle.values())))
            block = self._free.pop()
        else:
            raise RuntimeError("KV cache: no block is left")
        block.num_holders = 1
        return block

    def hold(self, block: Block) -> None:
        """One more holder of a known block."""
        self._idle.pop(block.index, None)
        block.num_holders += 1

    def drop(self, blocks: Iterable[Block], *, keep: bool = True) -> None:
        """One holder less of each of a sequence's ``blocks``. Known ones stay for reuse with ``keep``: the first longer
        than those behind it, which are found by way of it."""
        for block in reversed(list(blocks)):
            block.num_holders -= 1
            if block.num_holders:
                continue
            if block.is_known:
                self._idle[block.index] = block
                if not keep:
                    self._forget(block)
            else:
                self._free.append(block)

    def know(self, block: Block, key: PrefixKey, parent: Parent, tokens: TokenIds) -> Block:
        """Make a whole, valid block known; returns the one that is known for these tokens, which may be another."""
        name = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        siblings = self._children.setdefault(parent, {})
        known = siblings.get(name)
        if known is not None or block.is_known:
            return known or block
        self._last_node += 1
        block.key, block.parent, block.tokens, block.node = key, parent, name, self._last_node
        siblings[name] = block
        return block

    def find(self, parent: Parent, tokens: TokenIds) -> Block | None:
        """The known block of just these tokens behind ``parent``."""
        siblings = self._children.get(parent)
        if siblings is None:
            return None
        return siblings.get(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())

    def nearest(self, parent: Parent, tokens: TokenIds) -> tuple[int, Block | None]:
        """The known block behind ``parent`` that has most of its first tokens in common with ``tokens``: how many."""
        best, found = 0, None
        for _, block in zip(range(MOST_COMPARED), self._children.get(parent, {}).values(), strict=False):
            common = common_prefix(np.frombuffer(block.tokens, dtype=np.int32), tokens)
            if common > best:
                best, found = common, block
        return best, found

    def unknow(self, block: Block) -> None:
        """Nobody is to find a block that is held."""
        if block.parent is None:
            return
        siblings = self._children[block.parent]
        del siblings[block.tokens]
        if not siblings:
            del self._children[block.parent]
        block.key, block.parent, block.tokens, block.node = None, None, b"", 0

    def forget(self, adapter: str) -> None:
        """Free the idle blocks of an adapter."""
        for block in [one for one in self._idle.values() if one.key is not None and one.key.adapter == adapter]:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        del self._idle[block.index]
        self.unknow(block)
        self._free.append(block)

    def problems(self, tables: Iterable[Iterable[Block]]) -> list[str]:
        """What does not add up, ``tables`` being those of all sequences."""
        held: dict[int, int] = {}
        for table in tables:
            for block in table:
                held[block.index] = held.get(block.index, 0) + 1
        free = {block.index for block in self._free}
        problems = []
        if len(free) != len(self._free) or free & set(self._idle) or free & set(held) or set(held) & set(self._idle):
            problems.append("a block is in two states")
        if len(free) + len(self._idle) + len(held) != len(self.blocks) or len(self.blocks) > self.num_blocks:
            problems.append(f"{len(free)} free, {len(self._idle)} idle, {len(held)} held of {len(self.blocks)}")
        for block in self.blocks:
            if block.num_holders != held.get(block.index, 0):
                problems.append(f"block {block.index} has {held.get(block.index, 0)} holders, not {block.num_holders}")
            if block.is_known != (block.parent is not None and self._children[block.parent][block.tokens] is block):
                problems.append(f"block {block.index} is not known as itself")
            if block.index in free and block.is_known:
                problems.append(f"block {block.index} is free and known")
        if sum(map(len, self._children.values())) != sum(block.is_known for block in self.blocks):
            problems.append("the tree has other blocks than those that are known")
        return problems
