"""Computes grammar masks on a thread beside the model's forward; llguidance releases the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from .grammar_state import DraftedGrammarState, GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor


class BitmaskWorker:
    """A thread that computes grammar masks for the engine's thread, which must not touch the grammar states between
    ``begin`` and ``end``."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._job: Future[None] | None = None
        self._states: Sequence[GrammarState] = ()
        self._ahead: Sequence[DraftedGrammarState] = ()
        self._rows: Any = None

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Start to compute the masks of grammar states that lack one, and those of the positions after their drafts."""
        self._states = [grammar_state for grammar_state in states if not grammar_state.is_mask_valid]
        self._ahead = [grammar_state.ahead for grammar_state in states if grammar_state.ahead is not None]
        if not self._states and not self._ahead:
            return
        if self.pool is None:
            from llguidance import LLExecutor

            self.pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._executor = LLExecutor(num_threads=1)  # the default takes most of the CPUs
        self._rows = np.zeros((len(self._states), states[0].num_words), dtype=np.uint32)
        self._job = self.pool.submit(self._compute)

    def _compute(self) -> None:
        assert self._executor is not None
        rows = self._rows
        pairs = [(grammar_state.matcher, i) for i, grammar_state in enumerate(self._states)]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, rows.ctypes.data, rows.strides[0], len(rows))
        for ahead in self._ahead:
            ahead.compute()

    def end(self) -> None:
        """Wait for the masks and set them in their grammar states."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
            for grammar_state, row in zip(self._states, self._rows, strict=True):
                grammar_state.take(row)
        self._states = self._ahead = ()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
