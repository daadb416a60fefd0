"""Decode steps captured as CUDA graphs for a few sizes, so that a step is launched once instead of kernel by kernel.

::

    sizes      1  2  4  8  16 …  max_num_seqs
    5 rows  →  [ r0 r1 r2 r3 r4 | -- -- -- ]   captured for 8; the padding reads and writes block 0

Steps with prompts, adapters or input embeddings run by the model's code as usual. On CPU nothing is captured and the
same buffers are computed anew each time."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..attention.kv_cache import Row
from ..attention.paged.cache import PagedKVCache
from ..attention.paged.plan import PagedPlan
from ..attention.paged.step_tables import StepTables, row_indexes, table_array
from ..devices.transfers import upload
from ..models.step_input import StepInput
from ..weights.forward_context import ContextHolder, ForwardContext
from .runner import ModelForward

logger = logging.getLogger(__name__)
WARM_UPS = 2  # runs before capture, in which libraries select algorithms and allocate


def sizes_up_to(max_size: int) -> list[int]:
    """Return the powers of two up to ``max_size``, and ``max_size``."""
    return sorted({1 << i for i in range(max_size.bit_length()) if 1 << i <= max_size} | {max_size})


class RecordedStep:
    """A step of ``size`` single tokens over buffers at fixed addresses."""

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
        self.graph: Any = None
        self.logits: Any = None

    def record(self, memory: Any) -> None:
        """Capture the step into a CUDA graph whose temporary tensors use memory pool ``memory``, shared by all
        sizes."""
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.compute()
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self.logits = self.compute()
        self.graph = graph

    def run(self, ids: Any, rows: Sequence[Row]) -> Any:
        """Return logits [len(rows), V] of the tokens ``ids``, one for each of ``rows``, without waiting for the
        device."""
        self._fill(ids, rows)
        if self.graph is None:
            return self.compute()[: len(rows)]
        self.graph.replay()
        return self.logits[: len(rows)].clone()  # the next step overwrites it

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

    def compute(self) -> Any:
        self._holder.context = ForwardContext(num_tokens=self._size, attention=self._plan)
        try:
            return self._model(
                input_ids=self._ids, position_ids=self._positions, use_cache=False, logits_to_keep=0
            ).logits[0]
        finally:
            self._holder.context = None


class GraphedForward:
    """A ``StepForward`` that replays captured steps. ``reason`` says why nothing is captured, "" if all sizes are;
    ``why_not`` is a reason known in advance."""

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
        self.plain = plain
        self.device = cache.device
        self.sizes = sizes_up_to(max_num_seqs)
        self.steps = {size: RecordedStep(model, holder, cache, size) for size in self.sizes}
        self.reason = ""
        if cache.device.type != "cuda":
            self.reason = "there is no CUDA device; steps are computed without capture"
        elif why_not:  # the reference reads lengths from the device, which a graph cannot
            self._give_up(f"attention runs by torch: {why_not}")
        else:
            self.record()

    def record(self) -> None:
        memory = torch.cuda.graph_pool_handle()
        try:
            for size in reversed(self.sizes):  # largest first, since smaller ones fit into its memory
                self.steps[size].record(memory)
        except (RuntimeError, NotImplementedError) as error:  # code that reads computed values cannot be captured
            self._give_up(f"its code cannot be captured: {' '.join(str(error).split())[:300]}")

    def _give_up(self, reason: str) -> None:
        logger.warning("decode steps are not captured as CUDA graphs: %s", reason)
        self.reason = reason
        self.sizes = []
        self.steps = {}

    def forward(self, step: StepInput) -> Any:
        """See ``StepForward.forward``."""
        num_rows = len(step.rows)
        is_single = len(step.kept) == len(step.ids) == num_rows and step.virtual is None and not any(step.adapters)
        if not is_single or not self.takes(num_rows):
            return self.plain.forward(step)
        return self.decode(upload(step.ids, self.device), step.rows)

    def takes(self, num_rows: int) -> bool:
        """Return whether a step of so many single tokens has been captured."""
        return bool(self.sizes) and num_rows <= self.sizes[-1]

    def decode(self, ids: Any, rows: Sequence[Row]) -> Any:
        """Return logits [len(rows), V] of single tokens of the base model; ``ids`` int64 [len(rows)] are on the
        device."""
        return self.steps[self.sizes[bisect_left(self.sizes, len(rows))]].run(ids, rows)
