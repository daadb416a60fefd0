"""Decode steps captured as CUDA graphs for a few sizes, so that a step is launched once instead of kernel by kernel.

::

    sizes      1  2  4  8  16 …  max_num_seqs
    5 rows  →  [ r0 r1 r2 r3 r4 | -- -- -- ]   captured for 8; the padding reads and writes block 0

Steps with adapters are captured apart, when the first of them comes; their rows have slots of adapters
(``lora_slots``). Steps with prompts or input embeddings run by the model's code as usual. On CPU nothing is captured
and the same buffers are computed anew each time."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..adapters import lora_slots
from ..adapters.lora import LoraPool
from ..adapters.lora_slots import SlotPlan
from ..attention.kv_cache import Row
from ..attention.paged.cache import PagedKVCache
from ..attention.paged.plan import PagedPlan
from ..devices.transfers import constant, upload
from ..models.step_input import StepInput
from ..sampling.greedy import greedy_tokens
from ..weights.forward_context import ContextHolder, ForwardContext
from .runner import ModelForward
from .step_buffers import StepBuffers

logger = logging.getLogger(__name__)
WARM_UPS = 2  # runs before capture, in which libraries select algorithms and allocate


def sizes_up_to(max_size: int) -> list[int]:
    """Return the powers of two up to ``max_size``, and ``max_size``."""
    return sorted({1 << i for i in range(max_size.bit_length()) if 1 << i <= max_size} | {max_size})


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a step of single tokens on the device, until the next step: ``logits`` [B, V], and the token with
    each row's largest logit, int64 [B], -1 where that is not finite."""

    logits: Any
    largest: Any


class RecordedStep:
    """A step of ``size`` single tokens over buffers at fixed addresses."""

    def __init__(
        self, model: Any, holder: ContextHolder, cache: PagedKVCache, size: int, adapters: SlotPlan | None = None
    ) -> None:
        self._model = model
        self._holder = holder
        self._cache = cache
        self._size = size
        self._adapters = adapters
        self._buffers = StepBuffers(cache, size)
        self._plan = PagedPlan(cache.layers, self._buffers.tables, cache.max_model_len)
        self.graph: Any = None
        self.logits: Any = None
        self.largest: Any = None

    def record(self, memory: Any) -> None:
        """Capture the step into a CUDA graph whose temporary tensors use memory pool ``memory``, shared by all
        sizes."""
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                greedy_tokens(self.compute())
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self.logits = self.compute()
            self.largest = greedy_tokens(self.logits)
        self.graph = graph

    def run(self, ids: Any, rows: Sequence[Row]) -> Decoded:
        """Compute the tokens ``ids``, one for each of ``rows``, without waiting for the device. A negative number is no
        token: its row is computed for token 0."""
        self._buffers.fill(ids, rows)
        if self.graph is None:
            logits = self.compute()[: len(rows)]
            return Decoded(logits, greedy_tokens(logits))
        self.graph.replay()
        return Decoded(self.logits[: len(rows)], self.largest[: len(rows)])

    def put_slots(self, slots: Sequence[int]) -> None:
        """Set the slots of the rows' adapters; the padding has none."""
        if self._adapters is not None:
            padded = (*slots, *[0] * (self._size - len(slots)))
            self._adapters.rows.copy_(constant(padded, torch.int32, self._cache.device))

    def compute(self) -> Any:
        self._holder.context = ForwardContext(num_tokens=self._size, attention=self._plan, lora=self._adapters)
        try:
            return self._model(
                input_ids=self._buffers.ids.clamp_min(0),
                position_ids=self._buffers.positions,
                use_cache=False,
                logits_to_keep=0,
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
        lora: LoraPool | None = None,
    ) -> None:
        self.plain = plain
        self.device = cache.device
        self.sizes = sizes_up_to(max_num_seqs)
        self.steps = {size: RecordedStep(model, holder, cache, size) for size in self.sizes}
        self.adapted: dict[int, RecordedStep] | None = None  # None until there has been a step with adapters
        latent = any(layer.shape.shared for layer in cache.layers)  # its adapters are applied in another order
        self._lora = None if latent else lora
        self._make = partial(RecordedStep, model, holder, cache)
        self.reason = ""
        if cache.device.type != "cuda":
            self.reason = "there is no CUDA device; steps are computed without capture"
        elif why_not:  # the reference reads lengths from the device, which a graph cannot
            self._give_up(f"attention runs by torch: {why_not}")
        else:
            self.record()

    def record(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        try:
            for size in reversed(self.sizes):  # largest first, since smaller ones fit into its memory
                self.steps[size].record(self._memory)
        except (RuntimeError, NotImplementedError) as error:  # code that reads computed values cannot be captured
            self._give_up(f"its code cannot be captured: {' '.join(str(error).split())[:300]}")

    def record_adapted(self) -> None:
        """Capture the steps with adapters, if the kernels run; otherwise ``adapted`` stays empty."""
        self.adapted = {}
        lora = self._lora
        if lora is None or lora_slots.why_not(lora.device, lora.slots().dtype):
            return
        try:
            with torch.inference_mode():
                made = {size: self._make(size, SlotPlan(lora.slots(), size)) for size in self.sizes}
                for size in reversed(self.sizes if self.device.type == "cuda" else []):
                    made[size].record(self._memory)
        except Exception as error:  # also from Triton's compiler
            reason = " ".join(str(error).split())[:300]
            logger.warning("decode steps with adapters are not captured as CUDA graphs: %s", reason)
            return
        self.adapted = made

    def _give_up(self, reason: str) -> None:
        logger.warning("decode steps are not captured as CUDA graphs: %s", reason)
        self.reason = reason
        self.sizes = []
        self.steps = {}

    def forward(self, step: StepInput) -> Any:
        """See ``StepForward.forward``."""
        num_rows = len(step.rows)
        is_single = len(step.kept) == len(step.ids) == num_rows and step.virtual is None
        if not is_single or not self.takes(num_rows, step.adapters):
            return self.plain.forward(step)
        decoded = self.decode(upload(step.ids, self.device), step.rows, step.adapters)
        return decoded.logits.clone()  # the next step overwrites it

    def takes(self, num_rows: int, adapters: Sequence[str | None] = ()) -> bool:
        """Return whether a step of so many single tokens, with these adapters, has been captured."""
        if not self.sizes or num_rows > self.sizes[-1]:
            return False
        if not any(adapters):
            return True
        if self._lora is None or not self._lora.fit_slots(adapters):
            return False
        if self.adapted is None:
            self.record_adapted()
        return bool(self.adapted)

    def decode(self, ids: Any, rows: Sequence[Row], adapters: Sequence[str | None] = ()) -> Decoded:
        """Compute single tokens of the base model or of ``adapters``, one a row; ``ids`` int64 [len(rows)] are on the
        device, negative where there is no token."""
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        if not any(adapters):
            return self.steps[size].run(ids, rows)
        assert self.adapted is not None
        assert self._lora is not None
        step = self.adapted[size]
        step.put_slots(self._lora.slots_of(adapters))
        return step.run(ids, rows)
