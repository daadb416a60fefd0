"""The core of models that embed texts or score pairs: requests wait in a queue, each step computes one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import msgspec
import torch

from ...interface.bundle import Bundle
from ...interface.engine import Client, EngineInfo, EngineOutput, Health
from ...interface.errors import Aborted, DeadlineExceeded, ServingError
from ...interface.request import ValidRequest
from ..adapters.request_adapters import NoAdapters, RequestAdapters
from ..assembly import assemble_embedding
from ..forward.step_size import DEFAULT_TOKENS
from ..requests.embedding_queue import EmbeddingQueue
from ..scheduling.inflight import InflightRequest
from .engine_core import EngineCore, model_failure

logger = logging.getLogger(__name__)


class EmbeddingCore(EngineCore, pooled=True):
    """A core without a KV cache, sequences or adapters: all inputs of a request are embedded, or the request fails."""

    def _load(self, bundle: Bundle, pinned: Collection[str]) -> tuple[EngineInfo, RequestAdapters]:
        settings = self.settings
        self.parts = assemble_embedding(bundle, settings)
        max_tokens = 0 if settings.batch_invariant else settings.max_num_batched_tokens or DEFAULT_TOKENS
        self._embeddings = EmbeddingQueue(self.parts.embedder, max_tokens)
        return self.parts.info, NoAdapters()

    def _accept(self, request: ValidRequest, client: Client) -> None:
        adapter = self.request_adapters.claim(request)
        self.inflight.add(request, client, adapter)
        self._embeddings.add(request)

    def abort(self, request_id: str) -> None:
        """End a request early with ``Failed``. Unknown or finished requests are ignored."""
        inflight = self.inflight.get(request_id)
        if inflight is not None:
            self._fail(inflight, Aborted("the request was aborted"))

    def finish(self, request_id: str, index: int) -> None:
        """Do nothing: an input has no text that could be complete before its vector is there."""

    def _expire(self, inflight: InflightRequest) -> None:
        self._fail(inflight, DeadlineExceeded("the time limit passed before the embeddings were computed"))

    def _fail(self, inflight: InflightRequest, error: ServingError) -> None:
        self._embeddings.drop(inflight.request.request_id)
        self.inflight.fail(inflight, error)

    def has_work(self) -> bool:
        return self.inflight.has_outputs or len(self.inflight) > 0

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Embed one batch of inputs; return the events so far."""
        self._expire_late()
        if self._embeddings:
            self._embed()
            self._steps += 1
        self._contention.look()
        self._last_step = time.monotonic()
        return self.inflight.drain()

    def _embed(self) -> None:
        batch = self._embeddings.run()
        for request_id, outcome in batch:
            inflight = self.inflight.get(request_id)
            if inflight is None:
                continue
            if isinstance(outcome, Exception):
                logger.error("embedding request %s failed: %s", request_id, outcome)
                self._fail(inflight, model_failure(outcome))
                continue
            self.inflight.emit(inflight, outcome)
        for request_id in {request_id for request_id, _ in batch}:  # a batch may hold several inputs of a request
            inflight = self.inflight.get(request_id)
            if inflight is not None and self._embeddings.is_done(request_id):
                self.inflight.remove(inflight)

    def health(self) -> Health:
        return msgspec.structs.replace(
            super().health(), num_waiting=len(self._embeddings), num_tenants_waiting=self._embeddings.num_tenants
        )
