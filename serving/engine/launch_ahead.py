"""Decode steps on a device, each launched before the tokens of the one before it are read (vLLM's asynchronous
scheduling, SGLang's overlap scheduling).

::

    host      launch n+1 | read and deliver n | launch n+2 | read and deliver n+1 | …
    device    ───── n ────────┼──────────── n+1 ─────────────┼───────── n+2 ─────────

Step n+1 takes the tokens of step n where they are. Its sequences know nothing of it until it is read: what happens to
them before finds them as they would be without it, and a row that nobody wants any more, or a whole step, is left
unread. The KV that it wrote is behind all that is valid, in blocks that go back with their sequence; whoever has them
next writes to them after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .kv_cache import KVCache, Row
from .paged.decode_graphs import GraphedForward
from .sampler import UNDECIDED, choose, draw_unread, is_drawn_unread
from .scheduler import Run, Scheduler
from .sequence import Sampled
from .upload import upload, upload_values


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Of ``runs``, single tokens: ``logits`` [B, V] and ``tokens`` int64 [B] on the device; ``copy`` of these on the
    host is made when ``is_copied`` (a CUDA event; None where nothing is waited for) has come. ``unfounded``: sequences
    whose row was computed of a token that is not theirs."""

    runs: Sequence[Run]
    logits: Any
    tokens: Any
    copy: Any
    is_copied: Any
    unfounded: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> list[Run]:
        """The runs whose tokens are to be delivered."""
        alive = (run for run in self.runs if run.sequence.status == "running")
        return [run for run in alive if run.sequence.id not in self.unfounded]

    @property
    def rows(self) -> dict[int, int]:
        """Each sequence's row, by its id."""
        return {run.sequence.id: i for i, run in enumerate(self.runs)}

    def read(self) -> list[int]:
        """The tokens, when they are there."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        tokens: list[int] = self.copy.tolist()
        return tokens


class LaunchAhead:
    """Owns the step that is launched and not read, if there is one. ``graphs`` None: nothing is launched ahead."""

    def __init__(self, graphs: GraphedForward | None, scheduler: Scheduler, cache: KVCache) -> None:
        self._graphs = graphs
        self._scheduler = scheduler
        self._cache = cache
        self._launched: LaunchedStep | None = None

    @property
    def launched(self) -> list[Run]:
        """The runs of the launched step that are still wanted: while there are any, nothing else may be scheduled."""
        return [] if self._launched is None else self._launched.wanted

    def takes(self, runs: Sequence[Run]) -> bool:
        """Whether a scheduled step can be taken this way: each run is a token of a text, after which one is drawn on
        the device."""
        if self._graphs is None or not self._graphs.takes(len(runs)):
            return False
        return all(run.num_tokens == 1 and run.start >= run.sequence.num_prompt and _is_plain(run) for run in runs)

    def step(self, runs: Sequence[Run]) -> tuple[list[Run], list[Sampled]]:
        """Launch ``runs`` if they are not ``launched``, then what follows them if that is certain; returns those of
        ``runs`` that are wanted, with their tokens, their KV entered as valid."""
        launched, self._launched = self._launched, None
        if launched is None or not launched.wanted:
            ids = np.concatenate([run.sequence.slice(run.start, run.start + 1) for run in runs]).astype(np.int64)
            launched = self._launch(runs, upload(ids, self._device))
        self._launched = self._follow(launched)
        return self._read(launched)

    def drop(self) -> None:
        """Forget the launched step: its runs are computed again."""
        self._launched = None

    def _follow(self, step: LaunchedStep) -> LaunchedStep | None:
        runs = self._scheduler.following(step.wanted)
        if not runs:
            return None
        ids = step.tokens.clamp_min(0)  # what is no token ends its sequence, or makes its row unfounded
        if len(runs) < len(step.runs):
            row_of = step.rows
            rows = [row_of[run.sequence.id] for run in runs]
            ids = ids.index_select(0, upload_values(rows, torch.int64, self._device))
        return self._launch(runs, ids)

    def _launch(self, runs: Sequence[Run], ids: Any) -> LaunchedStep:
        assert self._graphs is not None
        logits = self._graphs.decode(ids, [Row(run.sequence.id, run.start, 1) for run in runs])
        tokens = draw_unread(logits, [run.sequence for run in runs], [run.start + 1 for run in runs])
        if tokens.device.type != "cuda":
            return LaunchedStep(runs, logits, tokens, tokens, None)
        copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        copy.copy_(tokens, non_blocking=True)
        is_copied = torch.cuda.Event()
        is_copied.record(torch.cuda.current_stream(tokens.device))
        return LaunchedStep(runs, logits, tokens, copy, is_copied)

    def _read(self, step: LaunchedStep) -> tuple[list[Run], list[Sampled]]:
        tokens, rows, wanted = step.read(), step.rows, step.wanted
        for run in wanted:
            sequence = run.sequence
            sequence.num_computed = run.start + 1
            self._cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
        undecided = [run.sequence for run in wanted if tokens[rows[run.sequence.id]] == UNDECIDED]
        if undecided:
            chosen = choose(step.logits[[rows[sequence.id] for sequence in undecided]], undecided)
            for sequence, token in zip(undecided, chosen, strict=True):
                tokens[rows[sequence.id]] = token
            if self._launched is not None:
                self._launched.unfounded.update(sequence.id for sequence in undecided)
        return wanted, [Sampled(tokens[rows[run.sequence.id]]) for run in wanted]

    @property
    def _device(self) -> Any:
        assert self._graphs is not None
        return self._graphs.device

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` where a launched step is not the next one of its sequences."""
        for run in self.launched:
            if not run.start == run.sequence.num_computed == run.sequence.num_tokens - 1:
                raise RuntimeError(f"sequence {run.sequence.id} was launched at {run.start}, which is not its end")


def _is_plain(run: Run) -> bool:
    sequence = run.sequence
    return run.samples and sequence.adapter is None and sequence.group.beams is None and is_drawn_unread(sequence)
