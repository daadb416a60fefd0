"""One forward: lay the runs out as a flat row of tokens, plan attention and adapters, call the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .kv_cache import KVCache, Row
from .scheduler import Run
from .step import Step, StepHolder


class Runner:
    """``lora`` is the adapter pool or None. Only the thread that made the model may call ``forward``."""

    def __init__(self, model: Any, holder: StepHolder, cache: KVCache, lora: Any, device: Any) -> None:
        self.model = model
        self.holder = holder
        self.cache = cache
        self.lora = lora
        self.device = device
        self.num_steps = 0

    def forward(self, runs: Sequence[Run]) -> tuple[list[Run], Any]:
        """Compute the KV of ``runs``.

        Returns the runs in the order they were laid out, and logits in that order: one row for each run that
        samples, for a run whose prompt is scored one row for each of its tokens.
        """
        runs = self._lay_out(runs)
        counts = [run.num_tokens for run in runs]
        ids = np.concatenate([r.sequence.tokens[r.start : r.start + r.num_tokens] for r in runs])
        positions = np.concatenate([np.arange(r.start, r.start + r.num_tokens) for r in runs])
        step = Step(num_tokens=len(ids))
        step.attention = self.cache.plan([Row(r.sequence.id, r.start, r.num_tokens) for r in runs])
        if self.lora is not None:
            step.lora = self.lora.plan([run.sequence.adapter for run in runs], counts)
        kept = rows_kept(runs)
        everything = len(kept) == len(ids)
        self.holder.step = step
        try:
            logits = self.model(
                input_ids=self._tensor(ids.astype(np.int64))[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                logits_to_keep=0 if everything else self._tensor(np.array(kept or [0], dtype=np.int64)),
            ).logits[0]
        finally:
            self.holder.step = None
        self.num_steps += 1
        for run in runs:
            sequence = run.sequence
            sequence.num_computed = run.start + run.num_tokens
            self.cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
        return runs, logits[: len(kept)]

    def _lay_out(self, runs: Sequence[Run]) -> list[Run]:
        single = {run.sequence.id: run for run in runs if run.num_tokens == 1}
        ordered = [single[owner] for owner in self.cache.decode_order(list(single))]
        return ordered + [run for run in runs if run.num_tokens > 1]

    def _tensor(self, array: Any) -> Any:
        return torch.from_numpy(array).to(self.device)


def rows_kept(runs: Sequence[Run]) -> list[int]:
    """Places in the flat row whose logits are needed."""
    kept: list[int] = []
    at = 0
    for run in runs:
        if run.sequence.prompt_scores is not None:
            kept.extend(range(at, at + run.num_tokens))
        elif run.samples:
            kept.append(at + run.num_tokens - 1)
        at += run.num_tokens
    return kept
