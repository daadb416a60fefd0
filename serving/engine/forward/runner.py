"""One forward pass: lay the chunks out as a flat row of tokens and compute it, by the model's own code or natively.

::

    StepForward         forward(StepInput) -> logits at the places kept
    ├── ModelForward    transformers' code with our attention, linears and adapters: every architecture, every device
    └── NativeDecoder   native_decoder.py: a whole step in one call, for the decoders of decoder_forms.py on CPU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..adapters.lora import LoraPool
from ..adapters.virtual_tokens import VirtualTokens
from ..attention.kv_cache import KVCache, Row
from ..models.step_input import StepInput
from ..scheduling.batch_invariance import pieces
from ..scheduling.scheduler import ScheduledChunk
from ..weights.forward_context import ContextHolder, ForwardContext


class StepForward(Protocol):
    """A way to compute one step. Used only by the engine's thread, which made the model."""

    @property
    def wants_decodes_together(self) -> bool:
        """Return whether single tokens must come first, in the order of their slots, with slots side by side."""
        ...

    def forward(self, step: StepInput) -> Any:
        """Return logits [len(kept), V] at the places kept. Writes the KV of every token."""
        ...


class ModelForward:
    """A forward by transformers' code. ``lora`` is None for a model without adapters."""

    wants_decodes_together = True

    def __init__(self, model: Any, holder: ContextHolder, cache: KVCache, lora: LoraPool | None, device: Any) -> None:
        self.model = model
        self._holder = holder
        self._cache = cache
        self._lora = lora
        self._device = device

    def forward(self, step: StepInput) -> Any:
        """See ``StepForward.forward``."""
        ids, rows, kept = step.ids, step.rows, step.kept
        positions = np.concatenate([np.arange(row.start, row.start + row.num_tokens) for row in rows])
        context = ForwardContext(num_tokens=len(ids), attention=self._cache.plan(rows))
        if self._lora is not None:
            context.lora = self._lora.plan(step.adapters, [row.num_tokens for row in rows])
        everything = len(kept) == len(ids)
        wanted = np.array(kept or [0], dtype=np.int64)
        self._holder.context = context
        try:
            logits = self.model(
                **self._inputs(ids, step.virtual),
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                logits_to_keep=0 if everything else self._tensor(wanted),
            ).logits[0]
        finally:
            self._holder.context = None
        return logits[: len(kept)]

    def _inputs(self, ids: Any, virtual: VirtualTokens | None) -> dict[str, Any]:
        if virtual is None:
            return {"input_ids": self._tensor(ids)[None]}
        known = ids.copy()
        known[virtual.places] = 0
        embedded = self.model.get_input_embeddings()(self._tensor(known))
        embedded[self._tensor(virtual.places)] = self._tensor(virtual.vectors).to(embedded.dtype)
        return {"inputs_embeds": embedded[None]}

    def _tensor(self, array: Any) -> Any:
        return torch.from_numpy(array).to(self._device)


class Runner:
    """The part that lays chunks out as one flat row, computes it by ``forward`` and marks its KV as valid in ``cache``.

    With ``batch_invariant``, it computes each piece of a chunk by itself.
    """

    def __init__(self, forward: StepForward, cache: KVCache, *, batch_invariant: bool = False) -> None:
        self.step_forward = forward
        self._cache = cache
        self._batch_invariant = batch_invariant
        self.num_steps = 0
        self.num_tables = 0  # requests in flight with a prompt table

    def forward(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Any]:
        """Compute the KV of ``chunks``.

        Returns the runs in the order in which they were laid out, and logits [sum of ``num_logits``, V] in that order.
        """
        if self._batch_invariant:
            chunks, logits = list(chunks), torch.cat([part for chunk in chunks for part in self._alone(chunk)])
        else:
            chunks = self._lay_out(chunks) if self.step_forward.wants_decodes_together else list(chunks)
            ids = np.concatenate([r.sequence.slice(r.start, r.start + r.num_tokens) for r in chunks]).astype(np.int64)
            rows = [Row(r.sequence.id, r.start, r.num_tokens) for r in chunks]
            virtual = virtual_tokens(chunks, ids) if self.num_tables else None
            adapters = [chunk.sequence.adapter for chunk in chunks]
            logits = self.step_forward.forward(StepInput(ids, rows, adapters, rows_kept(chunks), virtual))
        self.num_steps += 1
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + chunk.num_known
            self._cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
        return chunks, logits

    def _alone(self, chunk: ScheduledChunk) -> Iterator[Any]:
        """Return the logits that each piece of ``chunk`` needs.

        If a piece needs any, they are computed for all of its tokens: the shape must not depend on how many are needed.
        """
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        for start, stop in pieces(chunk.start, end, sequence.num_prompt):
            ids = sequence.slice(start, stop).astype(np.int64)
            needed = max(stop - max(start, end - chunk.num_logits), 0)
            kept = range(len(ids)) if needed else ()
            row = Row(sequence.id, start, len(ids))
            virtual = virtual_tokens([ScheduledChunk(sequence, start, len(ids))], ids) if self.num_tables else None
            logits = self.step_forward.forward(StepInput(ids, [row], [sequence.adapter], kept, virtual))
            yield logits[len(logits) - needed :]

    def _lay_out(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        single = {chunk.sequence.id: chunk for chunk in chunks if chunk.num_tokens == 1}
        ordered = [single[owner] for owner in self._cache.decode_order(list(single))]
        return ordered + [chunk for chunk in chunks if chunk.num_tokens > 1]


def rows_kept(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the rows whose logits are needed: the last ``num_logits`` of each chunk."""
    kept: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        kept += range(end - chunk.num_logits, end)
    return kept


def virtual_tokens(chunks: Sequence[ScheduledChunk], ids: Any) -> VirtualTokens | None:
    """Return the tokens of ``ids`` that are rows of their request's prompt table; None if there are none."""
    places, vectors, at = [], [], 0
    for chunk in chunks:
        first, at = at, at + chunk.num_tokens
        table = chunk.sequence.group.table
        if table is None or chunk.start >= chunk.sequence.num_prompt:
            continue
        found = first + np.flatnonzero(ids[first:at] >= table.first_id)
        if len(found):
            places.append(found)
            vectors.append(table.vectors_of(ids[found]))
    return VirtualTokens(np.concatenate(places), np.concatenate(vectors)) if places else None
