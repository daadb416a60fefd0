"""Decode steps recorded as CUDA graphs, one for each of a few sizes: a step is launched once, not kernel by kernel.

::

    sizes      1  2  4  8  16 …  max_num_seqs
    5 rows  →  [ r0 r1 r2 r3 r4 | -- -- -- ]   recorded at 8; what fills up reads and writes the block that is nobody's

Steps with prompts, adapters or vectors instead of tokens go by the model's code as ever. On CPU nothing is recorded and
the same buffers are computed anew each time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..adapters.virtual_tokens import VirtualTokens
from ..attention.kv_cache import Row
from ..attention.paged.cache import PagedKVCache
from ..attention.paged.plan import PagedPlan, StepTables, row_indexes, table_array
from ..devices.transfers import upload
from ..weights.forward_context import ContextHolder, ForwardContext
from .runner import ModelForward

logger = logging.getLogger(__name__)
WARM_UPS = 2  # runs before one is recorded: libraries choose and allocate in them


def sizes_up_to(most: int) -> list[int]:
    """Powers of two, and ``most``."""
    return sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})


class RecordedStep:
    """A step of ``size`` single tokens over buffers that stay where they are."""

    def __init__(self, model: Any, holder: ContextHolder, cache: PagedKVCache, size: int) -> None:
        device = cache.device
        self._model = model
        self._holder = holder
        self._cache = cache
        self._size = size
        self._ids = torch.zeros(1, size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, size, dtype=torch.int64, device=device)
        self._tables = StepTables(
            indexes=torch.zeros(size, dtype=torch.int64, device=device),
            block_tables=torch.zeros(size, cache.blocks_per_sequence, dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
            longest=cache.max_model_len,
        )
        self._plan = PagedPlan(cache.layers, self._tables, cache.max_model_len)
        self._graph: Any = None
        self._logits: Any = None

    def record(self, memory: Any) -> None:
        """As a CUDA graph whose passing tensors are in the pool ``memory``, which all sizes share."""
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute()
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self._logits = self._compute()
        self._graph = graph

    def run(self, ids: Any, rows: Sequence[Row]) -> Any:
        """Logits [len(rows), V] of tokens ``ids``, one for each of ``rows``, without waiting for the device."""
        self._fill(ids, rows)
        if self._graph is None:
            return self._compute()[: len(rows)]
        self._graph.replay()
        return self._logits[: len(rows)].clone()  # the next step writes over it

    def _fill(self, ids: Any, rows: Sequence[Row]) -> None:
        tables = [self._cache.blocks_of(row.owner) for row in rows]
        starts = np.array([row.start for row in rows], dtype=np.int64)
        blocks = table_array(tables)
        to = self._tables
        self._ids[0, : len(rows)].copy_(ids)
        self._put(self._positions[0], starts, 0)
        self._put(to.indexes, row_indexes(rows, tables, self._cache.block_size), 0)
        self._put(to.lengths, (starts + 1).astype(np.int32), 1)
        to.block_tables[: len(rows), : blocks.shape[1]].copy_(upload(blocks, self._cache.device))
        to.block_tables[len(rows) :, :1] = 0

    def _put(self, buffer: Any, values: Any, padding: int) -> None:
        padded = np.full(self._size, padding, dtype=values.dtype)
        padded[: len(values)] = values
        buffer.copy_(upload(padded, self._cache.device))

    def _compute(self) -> Any:
        self._holder.context = ForwardContext(num_tokens=self._size, attention=self._plan)
        try:
            return self._model(
                input_ids=self._ids, position_ids=self._positions, use_cache=False, logits_to_keep=0
            ).logits[0]
        finally:
            self._holder.context = None


class GraphedForward:
    """Implements ``StepForward``. ``reason``: why nothing is recorded, empty where all sizes are; ``why_not``: a reason
    that is known before."""

    wants_decodes_together = True

    def __init__(
        self,
        plain: ModelForward,
        model: Any,
        holder: ContextHolder,
        cache: PagedKVCache,
        max_num_seqs: int,
        *,
        why_not: str = "",
    ) -> None:
        self._plain = plain
        self.device = cache.device
        self.sizes = sizes_up_to(max_num_seqs)
        self._steps = {size: RecordedStep(model, holder, cache, size) for size in self.sizes}
        self.reason = ""
        if cache.device.type != "cuda":
            self.reason = "there is no CUDA device: their buffers are computed anew each time"
        elif why_not:  # a reference reads lengths from the device, which a graph cannot
            self._give_up(f"attention goes by torch: {why_not}")
        else:
            self._record()

    def _record(self) -> None:
        memory = torch.cuda.graph_pool_handle()
        try:
            for size in reversed(self.sizes):  # the largest first: smaller ones fit into its memory
                self._steps[size].record(memory)
        except (RuntimeError, NotImplementedError) as error:  # code that looks at what is computed cannot be recorded
            self._give_up(f"its code cannot be recorded: {' '.join(str(error).split())[:300]}")

    def _give_up(self, reason: str) -> None:
        logger.warning("decode steps are not recorded as CUDA graphs: %s", reason)
        self.reason = reason
        self.sizes = []
        self._steps = {}

    def forward(
        self,
        ids: Any,
        rows: Sequence[Row],
        adapters: Sequence[str | None],
        kept: Sequence[int],
        virtual: VirtualTokens | None = None,
    ) -> Any:
        """See ``StepForward.forward``."""
        single = len(kept) == len(ids) == len(rows) and virtual is None and not any(adapters)
        if not single or not self.takes(len(rows)):
            return self._plain.forward(ids, rows, adapters, kept, virtual)
        return self.decode(upload(ids, self.device), rows)

    def takes(self, num_rows: int) -> bool:
        """Whether there is a step for so many single tokens."""
        return bool(self.sizes) and num_rows <= self.sizes[-1]

    def decode(self, ids: Any, rows: Sequence[Row]) -> Any:
        """Logits [len(rows), V] of single tokens, of the base model: ``ids`` int64 [len(rows)] are on the device."""
        return self._steps[self.sizes[bisect_left(self.sizes, len(rows))]].run(ids, rows)
