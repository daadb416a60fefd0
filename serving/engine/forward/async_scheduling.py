"""Launches each decode step on a device before the tokens of the previous step are read.

(vLLM calls this asynchronous scheduling, SGLang overlap scheduling.)

::

    host      launch n+1 | read and deliver n | launch n+2 | read and deliver n+1 | …
    device    ───── n ────────┼──────────── n+1 ─────────────┼───────── n+2 ─────────

Step n+1 takes the tokens of step n from the device. Its sequences do not change until it is read, so whatever happens
to them before finds them as they would be without it. A row, or a whole step, that nobody wants any more is not read.
The KV that it wrote comes after all valid KV, in blocks that are freed with their sequence, and the next owner of these
blocks writes to them later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..attention.kv_cache import KVCache, Row
from ..devices.transfers import upload, upload_values
from ..sampling.device_sampler import DeviceSampler, Drawn
from ..sampling.sampler import NEEDS_FULL_SORT, is_drawn_unread, sample
from ..scheduling.scheduler import ScheduledChunk, Scheduler
from ..scheduling.sequence import Sampled, SequenceState
from .decode_graphs import GraphedForward


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step of ``chunks`` of single tokens, with ``logits`` [B, V] and what was ``drawn`` on the device.

    ``copy``, the same on the host, is complete once the CUDA event ``is_copied`` has occurred (None if there is nothing
    to wait for). ``unfounded``: sequences whose row was computed from a token that is not theirs."""

    chunks: Sequence[ScheduledChunk]
    logits: Any
    drawn: Drawn
    copy: Drawn
    is_copied: Any
    unfounded: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> list[ScheduledChunk]:
        """The chunks whose tokens are to be delivered."""
        alive = [chunk for chunk in self.chunks if chunk.sequence.status == "running"]
        return [chunk for chunk in alive if chunk.sequence.id not in self.unfounded] if self.unfounded else alive

    @property
    def rows(self) -> dict[int, int]:
        """The row of each sequence, by its id."""
        return {chunk.sequence.id: i for i, chunk in enumerate(self.chunks)}

    @property
    def unwanted(self) -> list[SequenceState]:
        """The sequences whose tokens are not to be delivered."""
        wanted = {chunk.sequence.id for chunk in self.wanted}
        return [chunk.sequence for chunk in self.chunks if chunk.sequence.id not in wanted]

    def read(self) -> list[Sampled]:
        """Wait for the tokens and return them."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return self.copy.sampled()


class AsyncScheduling:
    """The owner of the step that is launched but not read, if there is one. With ``graphs`` None nothing is launched
    ahead."""

    def __init__(
        self, graphs: GraphedForward | None, scheduler: Scheduler, cache: KVCache, sampler: DeviceSampler
    ) -> None:
        self._graphs = graphs
        self._scheduler = scheduler
        self._cache = cache
        self._launched: LaunchedStep | None = None
        self._sampler = sampler

    @property
    def launched(self) -> list[ScheduledChunk]:
        """The runs of the launched step that are still wanted. While there are any, nothing else may be scheduled."""
        return [] if self._launched is None else self._launched.wanted

    def takes(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Return whether a scheduled step can be run this way: each chunk is one generated token, and the next one can
        be sampled on the device."""
        if self._graphs is None or not self._graphs.takes(len(chunks), adapters_of(chunks)):
            return False
        return all(
            chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt and _is_plain(chunk) for chunk in chunks
        )

    def step(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], list[Sampled]]:
        """Launch ``chunks`` if they are not ``launched``, then the step after them if that is certain.

        Returns those of ``chunks`` that are wanted, and their tokens. Their KV is marked as valid."""
        launched, self._launched = self._launched, None
        if launched is None or not launched.wanted:
            if launched is not None:
                self._sampler.forget(launched.unwanted)
            ids = np.concatenate([chunk.sequence.slice(chunk.start, chunk.start + 1) for chunk in chunks]).astype(
                np.int64
            )
            launched = self._launch(chunks, upload(ids, self._device))
        self._launched = self.follow(launched)
        return self._read(launched)

    def drop(self) -> None:
        """Forget the launched step; its chunks will be computed again."""
        self._launched = None
        self._sampler.clear()

    def follow(self, step: LaunchedStep) -> LaunchedStep | None:
        chunks = self._scheduler.following(step.wanted)
        if not chunks:
            return None
        ids = step.drawn.tokens  # a negative number is no token: its sequence ends, or its row is unfounded
        if len(chunks) < len(step.chunks):
            row_of = step.rows
            rows = [row_of[chunk.sequence.id] for chunk in chunks]
            ids = ids.index_select(0, upload_values(rows, torch.int64, self._device))
        return self._launch(chunks, ids)

    def _launch(self, chunks: Sequence[ScheduledChunk], ids: Any) -> LaunchedStep:
        assert self._graphs is not None
        rows = [Row(chunk.sequence.id, chunk.start, 1) for chunk in chunks]
        found = self._graphs.decode(ids, rows, adapters_of(chunks))
        sequences, positions = [chunk.sequence for chunk in chunks], [chunk.start + 1 for chunk in chunks]
        drawn = self._sampler.draw(found.logits, sequences, positions, ids, found.largest)
        logits = found.logits
        if drawn.may_be_undecided:
            logits = logits.clone()  # ``_read`` looks at them after the next step has overwritten them
        if drawn.tokens.device.type != "cuda":
            return LaunchedStep(chunks, logits, drawn, drawn, None)
        copy = drawn.copied()
        is_copied = torch.cuda.Event()
        is_copied.record(torch.cuda.current_stream(drawn.tokens.device))
        return LaunchedStep(chunks, logits, drawn, copy, is_copied)

    def _read(self, step: LaunchedStep) -> tuple[list[ScheduledChunk], list[Sampled]]:
        sampled, wanted = step.read(), step.wanted
        if len(wanted) < len(step.chunks):
            self._sampler.forget(step.unwanted)
        for chunk in wanted:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + 1
            self._cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
        if len(wanted) == len(step.chunks) and not step.drawn.may_be_undecided:
            return wanted, sampled
        rows = step.rows
        undecided = [chunk.sequence for chunk in wanted if sampled[rows[chunk.sequence.id]].token_id == NEEDS_FULL_SORT]
        if undecided:
            self._sampler.forget(undecided)
            chosen = sample(step.logits[[rows[sequence.id] for sequence in undecided]], undecided)
            for sequence, one in zip(undecided, chosen, strict=True):
                sampled[rows[sequence.id]] = one
            if self._launched is not None:
                self._launched.unfounded.update(sequence.id for sequence in undecided)
        return wanted, [sampled[rows[chunk.sequence.id]] for chunk in wanted]

    @property
    def _device(self) -> Any:
        assert self._graphs is not None
        return self._graphs.device

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if a launched step is not the next one of its sequences."""
        for chunk in self.launched:
            if not chunk.start == chunk.sequence.num_computed == chunk.sequence.num_tokens - 1:
                raise RuntimeError(f"sequence {chunk.sequence.id} was launched at {chunk.start}, which is not its end")


def adapters_of(chunks: Sequence[ScheduledChunk]) -> list[str | None]:
    """Return the adapter of each of ``chunks``."""
    return [chunk.sequence.adapter for chunk in chunks]


def _is_plain(chunk: ScheduledChunk) -> bool:
    sequence = chunk.sequence
    return chunk.samples and sequence.group.beams is None and is_drawn_unread(sequence)
