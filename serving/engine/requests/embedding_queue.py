"""The queue of embedding requests: inputs of many requests run together, up to a number of tokens.

The tenant that has been served least is next (``tenants``). A tenant's requests take turns, one input each, so a short
request does not wait behind a large one. A request's own inputs are sorted by length, so that a batch of a large
request has inputs of equal length, which share a call of the attention. Background requests (of batches) run while no
others wait, in smaller batches.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ...interface.events import Embedded
from ...interface.request import BACKGROUND, STANDARD, ValidRequest
from ..models.pooling import InputEmbedder
from ..scheduling.tenants import LeastServed, Tenant, Tenants

Outcome = Embedded | Exception
BACKGROUND_BATCH_SHARE = 1 / 4  # part of a batch's tokens in batches of background requests: others wait less for one


class EmbeddingQueue:
    """A queue that batches the inputs of waiting requests.

    A batch has at most ``max_tokens`` tokens; with 0 each input is a batch of its own."""

    def __init__(self, embedder: InputEmbedder, max_tokens: int) -> None:
        self._embedder = embedder
        self._max_tokens = max_tokens
        self._lines: dict[Tenant, dict[str, deque[int]]] = {}  # input indices by request, in the order of their turns
        self._requests: dict[str, ValidRequest] = {}
        self._left: dict[str, int] = {}
        self._tenants = Tenants()
        self._turns = {STANDARD: LeastServed(), BACKGROUND: LeastServed()}
        self._num_inputs = 0

    def __len__(self) -> int:
        """Return how many inputs wait."""
        return self._num_inputs

    @property
    def num_tenants(self) -> int:
        """How many tenants wait."""
        return len(self._lines)

    def add(self, request: ValidRequest) -> None:
        kind = _class_of(request)
        tenant = self._tenants.of(request.tenant, kind)
        if tenant not in self._lines:
            self._tenants.lift(tenant, self._turns[kind].lowest)
            self._lines[tenant] = {}
        tenant.num_unfinished += 1
        sizes = [len(sequence.prompt_token_ids) for sequence in request.sequences]
        self._lines[tenant][request.request_id] = deque(sorted(range(len(sizes)), key=sizes.__getitem__))
        self._turns[kind].push(tenant)
        self._requests[request.request_id] = request
        self._left[request.request_id] = len(sizes)
        self._num_inputs += len(sizes)

    def drop(self, request_id: str) -> None:
        """Forget the remaining inputs of a request."""
        request = self._requests.pop(request_id, None)
        self._left.pop(request_id, None)
        if request is None:
            return
        tenant = self._tenants.of(request.tenant, _class_of(request))
        tenant.num_unfinished -= 1
        line = self._lines.get(tenant, {})
        self._num_inputs -= len(line.pop(request_id, ()))
        if not line:
            self._leave(tenant)

    def _leave(self, tenant: Tenant) -> None:
        """Note that nothing of ``tenant`` waits any more."""
        if self._lines.pop(tenant, None) is not None:
            for turns in self._turns.values():
                turns.discard(tenant)
            self._tenants.left(tenant)

    def is_done(self, request_id: str) -> bool:
        return request_id not in self._left

    def run(self) -> list[tuple[str, Outcome]]:
        """Embed one batch. If a batch of several inputs fails, its inputs run one by one to find the one at fault."""
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
        """Take inputs in their turns while they fit. An input larger than a batch is a batch of its own."""
        batch: list[tuple[ValidRequest, int]] = []
        kind = BACKGROUND if self._turns[STANDARD].lowest is None else STANDARD
        budget = self._max_tokens if kind == STANDARD else int(self._max_tokens * BACKGROUND_BATCH_SHARE)
        while (tenant := self._turns[kind].lowest) is not None:
            line = self._lines[tenant]
            request_id, inputs = next(iter(line.items()))
            request = self._requests[request_id]
            size = len(request.sequences[inputs[0]].prompt_token_ids)
            if batch and size > budget:
                break
            budget -= size
            tenant.used += size / request.weight
            batch.append((request, inputs.popleft()))
            self._num_inputs -= 1
            del line[request_id]
            if inputs:
                line[request_id] = inputs  # after the tenant's others
            elif not line:
                self._leave(tenant)
        return batch

    def _embed(self, batch: list[tuple[ValidRequest, int]]) -> Any:
        ids = [request.sequences[i].prompt_token_ids for request, i in batch]
        if not any(request.second_from for request, _ in batch):
            return self._embedder.embed(ids)
        ends = [len(one) for one in ids]
        seconds = [r.second_from[i] if r.second_from else end for (r, i), end in zip(batch, ends, strict=True)]
        return self._embedder.embed(ids, seconds)


def _class_of(request: ValidRequest) -> int:
    return BACKGROUND if request.background else STANDARD


def _embedded(index: int, vector: Any) -> Embedded:
    """Return the event with the whole vector; ``tasks.embed`` cuts it to a request's ``dimensions``."""
    return Embedded(index, np.asarray(vector, dtype="<f4").tobytes())
