"""Computes grammar masks on a thread beside the model's forward; llguidance releases the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from .grammar_state import DraftedMatching, Matching

if TYPE_CHECKING:
    from llguidance import LLExecutor


class Masks:
    """Computes masks for the engine's thread, which must not touch the matchings between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._job: Future[None] | None = None
        self._matchings: Sequence[Matching] = ()
        self._ahead: Sequence[DraftedMatching] = ()
        self._rows: Any = None

    def begin(self, matchings: Sequence[Matching]) -> None:
        """Start to compute the masks of matchings that lack one, and those of the places after their drafts."""
        self._matchings = [matching for matching in matchings if not matching.is_known]
        self._ahead = [matching.ahead for matching in matchings if matching.ahead is not None]
        if not self._matchings and not self._ahead:
            return
        if self._pool is None:
            from llguidance import LLExecutor

            self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._executor = LLExecutor(num_threads=1)  # the default takes most of the processors
        self._rows = np.zeros((len(self._matchings), matchings[0].num_words), dtype=np.uint32)
        self._job = self._pool.submit(self._compute)

    def _compute(self) -> None:
        assert self._executor is not None
        rows = self._rows
        pairs = [(matching.matcher, i) for i, matching in enumerate(self._matchings)]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, rows.ctypes.data, rows.strides[0], len(rows))
        for ahead in self._ahead:
            ahead.compute()

    def end(self) -> None:
        """Wait for the masks and give them to their matchings."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
            for matching, row in zip(self._matchings, self._rows, strict=True):
                matching.take(row)
        self._matchings = self._ahead = ()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
