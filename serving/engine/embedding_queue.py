"""Embedding requests waiting for a batch: inputs of many requests run together, up to a number of tokens."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

from ..events import Embedded
from ..request import ValidRequest

Outcome = Embedded | Exception


class EmbeddingQueue:
    """``embedder.embed(list of token id tuples)`` → float32 array [n, dim], pooled and normalised."""

    def __init__(self, embedder: Any, max_tokens: int) -> None:
        self._embedder = embedder
        self._max_tokens = max_tokens
        self._inputs: deque[tuple[ValidRequest, int]] = deque()
        self._left: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._inputs)

    def add(self, request: ValidRequest) -> None:
        self._inputs.extend((request, i) for i in range(len(request.sequences)))
        self._left[request.request_id] = len(request.sequences)

    def drop(self, request_id: str) -> None:
        """Forget what waits of a request."""
        if self._left.pop(request_id, 0):
            self._inputs = deque(item for item in self._inputs if item[0].request_id != request_id)

    def is_done(self, request_id: str) -> bool:
        return not self._left.get(request_id)

    def run(self) -> list[tuple[str, Outcome]]:
        """Embed one batch; an error of a mixed batch is pinned down by running its inputs one by one."""
        batch = self._take()
        outcomes: list[tuple[str, Outcome]] = []
        try:
            vectors = self._embed(batch)
            outcomes = [(r.request_id, self._told(r, i, v)) for (r, i), v in zip(batch, vectors, strict=True)]
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0][0].request_id, error)]
            for request, index in batch:
                try:
                    vector = self._embed([(request, index)])[0]
                    outcomes.append((request.request_id, self._told(request, index, vector)))
                except Exception as own:
                    outcomes.append((request.request_id, own))
        for request_id, outcome in outcomes:
            if isinstance(outcome, Embedded):
                self._left[request_id] -= 1
        self._left += Counter()  # drops what reached zero
        return outcomes

    def _take(self) -> list[tuple[ValidRequest, int]]:
        batch: list[tuple[ValidRequest, int]] = []
        budget = self._max_tokens
        while self._inputs:
            request, index = self._inputs[0]
            size = len(request.sequences[index].prompt_token_ids)
            if batch and size > budget:
                break
            budget -= size
            batch.append(self._inputs.popleft())
        return batch

    def _embed(self, batch: list[tuple[ValidRequest, int]]) -> Any:
        return self._embedder.embed([request.sequences[i].prompt_token_ids for request, i in batch])

    def _told(self, request: ValidRequest, index: int, vector: Any) -> Embedded:
        vector = np.asarray(vector, dtype="<f4")
        if request.dimensions is not None and request.dimensions < len(vector):
            vector = vector[: request.dimensions]
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return Embedded(index, vector.astype("<f4").tobytes())
