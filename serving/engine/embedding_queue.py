"""Embedding requests waiting for a batch: inputs of many requests run together, up to a number of tokens.

Requests take turns, an input each, so a short one does not wait behind a bulk; a request's own inputs go by length, so
that a batch of a bulk holds equal lengths, which share a call of the attention.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ..events import Embedded
from ..request import ValidRequest

Outcome = Embedded | Exception


class EmbeddingQueue:
    """``embedder.embed(token id tuples, where the second text of each begins)`` → float32 array [n, dim]: pooled and
    normalised vectors, or a cross-encoder's numbers."""

    def __init__(self, embedder: Any, max_tokens: int) -> None:
        self._embedder = embedder
        self._max_tokens = max_tokens
        self._waiting: dict[str, deque[int]] = {}  # indices of inputs by request, in the order of their turns
        self._requests: dict[str, ValidRequest] = {}
        self._left: dict[str, int] = {}

    def __len__(self) -> int:
        """Inputs that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, request: ValidRequest) -> None:
        sizes = [len(sequence.prompt_token_ids) for sequence in request.sequences]
        self._waiting[request.request_id] = deque(sorted(range(len(sizes)), key=sizes.__getitem__))
        self._requests[request.request_id] = request
        self._left[request.request_id] = len(sizes)

    def drop(self, request_id: str) -> None:
        """Forget what is left of a request."""
        self._waiting.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._left.pop(request_id, None)

    def is_done(self, request_id: str) -> bool:
        return request_id not in self._left

    def run(self) -> list[tuple[str, Outcome]]:
        """Embed one batch; an error of a mixed batch is pinned down by running its inputs one by one."""
        batch = self._take()
        outcomes: list[tuple[str, Outcome]] = []
        try:
            vectors = self._embed(batch)
            outcomes = [(r.request_id, _embedded(i, v)) for (r, i), v in zip(batch, vectors, strict=True)]
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0][0].request_id, error)]
            for request, index in batch:
                try:
                    vector = self._embed([(request, index)])[0]
                    outcomes.append((request.request_id, _embedded(index, vector)))
                except Exception as own:
                    outcomes.append((request.request_id, own))
        for request_id, outcome in outcomes:
            if isinstance(outcome, Embedded):
                self._count(request_id)
        return outcomes

    def _count(self, request_id: str) -> None:
        self._left[request_id] -= 1
        if not self._left[request_id]:
            self.drop(request_id)

    def _take(self) -> list[tuple[ValidRequest, int]]:
        """An input of each request in turn while they fit; an input larger than a batch is one of its own."""
        batch: list[tuple[ValidRequest, int]] = []
        budget = self._max_tokens
        while self._waiting:
            request_id, inputs = next(iter(self._waiting.items()))
            request = self._requests[request_id]
            size = len(request.sequences[inputs[0]].prompt_token_ids)
            if batch and size > budget:
                break
            budget -= size
            batch.append((request, inputs.popleft()))
            del self._waiting[request_id]
            if inputs:
                self._waiting[request_id] = inputs  # after the others
        return batch

    def _embed(self, batch: list[tuple[ValidRequest, int]]) -> Any:
        ids = [request.sequences[i].prompt_token_ids for request, i in batch]
        if not any(request.second_from for request, _ in batch):
            return self._embedder.embed(ids)
        ends = [len(one) for one in ids]
        seconds = [r.second_from[i] if r.second_from else end for (r, i), end in zip(batch, ends, strict=True)]
        return self._embedder.embed(ids, seconds)


def _embedded(index: int, vector: Any) -> Embedded:
    """The whole vector; ``tasks.embed`` cuts it to a request's ``dimensions``."""
    return Embedded(index, np.asarray(vector, dtype="<f4").tobytes())
