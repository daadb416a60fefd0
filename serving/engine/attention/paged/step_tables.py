"""The tables of a step over KV blocks: where each token's KV goes, and which blocks each sequence reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..kv_cache import Row


class BlockTables(Protocol):
    """The block tables of running sequences, as a cache in blocks of ``block_size`` tokens keeps them."""

    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for ``num_tokens``."""
        ...

    def blocks_of(self, owner: int) -> list[int]:
        """Return the block table of a running sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[a, b)`` of the flat row, which are those from position ``start`` on of a sequence with this block
    table."""

    a: int
    b: int
    start: int
    blocks: Any

    @property
    def stop(self) -> int:
        return self.start + self.b - self.a


@dataclass(frozen=True, slots=True)
class StepTables:
    """The tables that a step's attention reads, on the device. ``indexes`` int64 [T] says where each token's KV goes.
    For the single tokens, which come first: ``block_tables`` int32 [B, blocks] and ``lengths`` int32 [B]; for the
    chunks after them: ``chunk_tables`` int32 [chunks, blocks]."""

    indexes: Any
    block_tables: Any
    lengths: Any
    chunks: Sequence[Chunk] = ()
    chunk_tables: Any = None
    longest: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], cache: BlockTables, device: Any) -> StepTables:
        """Lay out the tables of ``rows``, single tokens first, on ``device``."""
        tables = [cache.blocks_of(row.owner) for row in rows]
        n = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
        lengths = [row.start + 1 for row in rows[:n]]
        chunks, a = [], n
        used = [cache.num_blocks(row.start + row.num_tokens) for row in rows[n:]]
        chunk_tables = torch.from_numpy(table_array([t[:k] for t, k in zip(tables[n:], used, strict=True)])).to(device)
        for row, blocks, count in zip(rows[n:], chunk_tables, used, strict=True):
            chunks.append(Chunk(a, a + row.num_tokens, row.start, blocks[:count]))
            a += row.num_tokens
        return cls(
            indexes=torch.from_numpy(row_indexes(rows, tables, cache.block_size)).to(device),
            block_tables=torch.from_numpy(table_array(tables[:n])).to(device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            chunks=chunks,
            chunk_tables=chunk_tables,
            longest=max(lengths, default=0),
        )

    @property
    def num_decodes(self) -> int:
        return len(self.lengths)


def row_indexes(rows: Sequence[Row], tables: Sequence[Sequence[int]], size: int) -> Any:
    """Return where each token's KV goes, int64 [T]: an index into all blocks' tokens."""
    parts = []
    for row, table in zip(rows, tables, strict=True):
        at = np.arange(row.start, row.start + row.num_tokens)
        parts.append(np.asarray(table, dtype=np.int64)[at // size] * size + at % size)
    return np.concatenate(parts)


def table_array(tables: Sequence[Sequence[int]]) -> Any:
    """Return block tables as int32 [B, longest table], padded with block 0."""
    array = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in zip(array, tables, strict=True):
        row[: len(table)] = table
    return array
