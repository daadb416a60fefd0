"""The buffers that a recorded step reads, at fixed addresses, and how a step of single tokens is laid out in them.

::

    packed     positions int64 | indexes int64 | lengths int32      one copy to the device a step
    tables     int32 [size, blocks]                                 one more, if a row has other blocks than before

Rows that pad a step to its size have position and index 0 and length 1: they read and write block 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..attention.kv_cache import Row
from ..attention.paged.block_pool import PADDING, Block
from ..attention.paged.cache import PagedKVCache
from ..attention.paged.step_tables import StepTables
from ..devices.transfers import staging


class StepBuffers:
    """The input of a step of ``size`` single tokens: ``ids`` and ``positions`` int64 [1, size], and ``tables``."""

    def __init__(self, cache: PagedKVCache, size: int) -> None:
        self._cache = cache
        self._size = size
        self.ids = torch.zeros(1, size, dtype=torch.int64, device=cache.device)
        self._packed = torch.zeros(2 * size + (size + 1) // 2, dtype=torch.int64, device=cache.device)
        positions, indexes, lengths = self._parts(self._packed)
        lengths.fill_(1)
        self.positions = positions[None]
        self.tables = StepTables(
            indexes=indexes,
            block_tables=torch.zeros(size, cache.blocks_per_sequence, dtype=torch.int32, device=cache.device),
            lengths=lengths,
            longest=cache.max_model_len,
        )
        self._known: list[list[Block]] = [[] for _ in range(size)]  # the blocks that ``block_tables`` has
        self._host = np.zeros((size, 1), dtype=np.int32)  # the same, as wide as the longest has been

    def _parts(self, packed: Any) -> tuple[Any, Any, Any]:
        size = self._size
        return packed[:size], packed[size : 2 * size], packed[2 * size :].view(torch.int32)[:size]

    def fill(self, ids: Any, rows: Sequence[Row]) -> None:
        """Lay out the tokens ``ids``, one for each of ``rows``, without waiting for the device."""
        n, block_size = len(rows), self._cache.block_size
        self.ids[0, :n].copy_(ids)
        self._put_tables([self._cache.tables[row.owner].blocks for row in rows])
        packed = staging(len(self._packed), torch.int64, self._cache.device)
        positions, indexes, lengths = (part.numpy() for part in self._parts(packed))
        positions[:n] = [row.start for row in rows]
        starts = positions[:n]
        indexes[:n] = self._host[np.arange(n), starts // block_size].astype(np.int64) * block_size + starts % block_size
        lengths[:n] = starts + 1
        positions[n:], indexes[n:], lengths[n:] = 0, PADDING, 1
        self._packed.copy_(packed, non_blocking=True)

    def _put_tables(self, tables: Sequence[list[Block]]) -> None:
        changed = [i for i, blocks in enumerate(tables) if self._known[i] != blocks]
        emptied = [i for i in range(len(tables), self._size) if self._known[i]]
        if not changed and not emptied:
            return
        width = max(map(len, tables))
        if width > self._host.shape[1]:
            wider = np.zeros((self._size, min(2 * width, self.tables.block_tables.shape[1])), dtype=np.int32)
            wider[:, : self._host.shape[1]] = self._host
            self._host = wider
        for i in changed:
            self._host[i, : len(tables[i])] = [block.index for block in tables[i]]
        self._host[emptied, 0] = PADDING
        new = staging(self._size * width, torch.int32, self._cache.device).view(self._size, width)
        new.numpy()[:] = self._host[:, :width]
        self.tables.block_tables[:, :width].copy_(new.to(self._cache.device, non_blocking=True))
        for i in changed:  # last: if there was no memory for a copy, the next step copies
            self._known[i] = list(tables[i])
        for i in emptied:
            self._known[i] = []
