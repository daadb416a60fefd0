"""The ways in which requests leave the engine: each sequence finishes, or the request fails. Both clean up."""

from __future__ import annotations

import logging

from ...interface.errors import InternalError, ServingError
from ...interface.events import FinishReason
from ..attention.kv_cache import KVCache
from ..beams.beam_group import BeamGroup
from ..constraints.grammars import Grammars
from ..scheduling.inflight import InflightRequest, InflightRequests
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import SequenceGroup, SequenceState

logger = logging.getLogger(__name__)


class RequestFinisher:
    """The part that removes finished and failed requests from all parts of the engine.

    ``generated`` counts the tokens given to requests, ``generated_provisioned`` those given to provisioned ones."""

    def __init__(self, inflight: InflightRequests, scheduler: Scheduler, cache: KVCache, grammars: Grammars) -> None:
        self._inflight = inflight
        self._scheduler = scheduler
        self._cache = cache
        self._grammars = grammars
        self.generated = self.generated_provisioned = 0

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """Finish a sequence; for a beam, its whole search.

        The texts of a search have their own finish reasons unless ``reason`` is "abort" or "deadline"."""
        group = sequence.group
        if isinstance(group.beams, BeamGroup):
            if sequence.status != "finished":
                self._finish_search(group, group.beams, reason)
        else:
            self._scheduler.finish(sequence)
            self._inflight.finish(sequence, reason)
        if self._grammars and sequence.request.request_id not in self._inflight:
            self._grammars.forget(sequence.request.request_id)

    def _finish_search(self, group: SequenceGroup, beams: BeamGroup, reason: FinishReason) -> None:
        for number, beam in enumerate(group.members):
            self._scheduler.finish(beam, keep=number == 0)
        texts = beams.texts(reason)
        self.count(group.members[0], sum(len(text.token_ids) for text in texts), charged=True)
        self._inflight.finish_search(group, texts)

    def fail(self, inflight: InflightRequest, error: ServingError) -> None:
        """Fail a request: finish all of its sequences and remove it from the engine."""
        for sequence in inflight.unfinished:
            self._scheduler.finish(sequence, keep=False)
        self._grammars.forget(inflight.request.request_id)
        self._inflight.fail(inflight, error)

    def fail_grammar(self, sequence: SequenceState, error: ServingError) -> None:
        """Fail the request of a sequence that cannot continue within its grammar; the next request compiles the grammar
        again."""
        inflight = self._inflight.of(sequence)
        logger.warning("request %s: %s", inflight.request.request_id, error.logged)
        assert sequence.sampling.grammar is not None
        self._grammars.spoil(sequence.sampling.grammar)
        self.fail(inflight, error)

    def fail_not_finite(self, sequence: SequenceState) -> None:
        """Fail the request of a sequence whose logits are not finite, and wipe its KV.

        For a beam, the KV of the whole search is wiped, since its beams may have copied numbers that are not finite."""
        for one in (sequence,) if sequence.group.beams is None else sequence.group.members:
            if one.status == "running":
                self._cache.wipe(one.id)
        logger.error("request %s: logits are not finite", sequence.request.request_id)
        error = InternalError("the model produced numbers that are not finite")
        self.fail(self._inflight.of(sequence), error)

    def count(self, sequence: SequenceState, generated: int, *, charged: bool = False) -> None:
        if not charged:
            sequence.charge(generated)
        self.generated += generated
        self.generated_provisioned += generated * sequence.provisioned
