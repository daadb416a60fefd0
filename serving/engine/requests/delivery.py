"""Delivers the results of a forward: scores and logits of prompts, tokens, and steps of beam searches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ...interface.errors import ServingError
from ...interface.events import PromptScored
from ...interface.stop_rule import StopReason
from ..attention.kv_cache import KVCache
from ..beams.beam_group import BeamGroup
from ..constraints.logits_processors import nothing_left
from ..sampling.device_sampler import DeviceSampler
from ..sampling.sampler import score_prompt
from ..scheduling.inflight import InflightRequests
from ..scheduling.scheduler import ScheduledChunk, Scheduler
from ..scheduling.sequence import NO_ALLOWED_TOKEN, Sampled, SamplePosition, SequenceGroup, SequenceState
from .finisher import RequestFinisher


class Delivery:
    """The delivery of a step's results; it works on the engine's own parts. ``add_member(group, index)`` adds a
    sequence to a group."""

    def __init__(
        self,
        inflight: InflightRequests,
        scheduler: Scheduler,
        cache: KVCache,
        exits: RequestFinisher,
        add_member: Callable[[SequenceGroup, int], SequenceState],
        sampler: DeviceSampler,
    ) -> None:
        self._inflight = inflight
        self._scheduler = scheduler
        self._cache = cache
        self._exits = exits
        self._add_member = add_member
        self._sampler = sampler
        self._began, self._batch_size = 0.0, 0  # of the step that is being delivered

    def process_outputs(
        self, laid_out: Sequence[ScheduledChunk], logits: Any, over: Container[SequenceState], began: float
    ) -> None:
        """Score prompts, and sample at every ``sample_positions`` of each chunk: 0 to n tokens per sequence.

        ``logits`` [R, V] are those of ``laid_out``, one chunk after another. Sequences in ``over`` get no more tokens.
        ``began`` is the time of the step's start (``time.monotonic``)."""
        self._began, self._batch_size = began, len(laid_out)
        rows: list[int] = []
        places: list[SamplePosition] = []
        shares: list[tuple[ScheduledChunk, int, int]] = []  # runs with the first and last of their places
        searches: dict[int, SequenceGroup] = {}  # groups whose beams all have their logits
        at = 0
        for chunk in laid_out:
            first, at = at, at + chunk.num_logits
            here = chunk.sample_positions
            beams = chunk.sequence.group.beams
            if here and isinstance(beams, BeamGroup):
                if beams.take(chunk.sequence, logits[at - 1]):
                    searches[id(beams)] = chunk.sequence.group
            elif here and chunk.sequence not in over:
                shares.append((chunk, len(places), len(places) + len(here)))
                start = at - 1 - chunk.num_drafted
                rows += range(start, start + len(here))
                places += here
            if chunk.sequence.reads_prompt and chunk.sequence.status == "running":
                self._read_prompt(chunk, logits[first:at])
        if places:
            sampled = self._sampler.sample(logits if len(rows) == len(logits) else logits[rows], places)
            for chunk, start, end in shares:
                wanted = logits[rows[start:end]] if chunk.sequence.sampling.generation_logits else None
                if chunk.num_drafted:
                    self._deliver_verified(chunk, sampled[start:end], wanted)
                else:
                    self._deliver(chunk.sequence, sampled[start:end], wanted)
        for group in searches.values():
            self._search(group)

    def process_sampled(self, chunks: Sequence[ScheduledChunk], sampled: Sequence[Sampled], began: float) -> None:
        """Give each of ``chunks`` its token, which was sampled on the device. ``began`` is the time of the step's
        start."""
        self._began, self._batch_size = began, len(chunks)
        for chunk, one in zip(chunks, sampled, strict=True):
            self._deliver(chunk.sequence, [one], None)

    def end_complete(self, sequences: Sequence[SequenceState]) -> frozenset[SequenceState]:
        """End the sequences whose grammar now allows nothing more, whether their text is complete or a dead end; return
        them."""
        over = []
        for sequence in sequences:
            if sequence.status != "running":  # a sibling failed the request in this very step
                over.append(sequence)
                continue
            assert sequence.grammar_state is not None
            try:
                if not sequence.grammar_state.check():
                    over.append(sequence)
                    self._exits.finish(sequence, "stop")
            except ServingError as error:
                over.append(sequence)
                self._exits.fail_grammar(sequence, error)
        return frozenset(over)

    def follow(self, sequence: SequenceState, known: int, reason: StopReason | None) -> StopReason | None:
        """Follow a sequence's grammar and count the forced tokens; see ``SequenceState.follow``."""
        before = sequence.num_tokens
        reason = sequence.follow(known, reason)
        self._exits.count(sequence, sequence.num_tokens - before)
        return reason

    def _read_prompt(self, chunk: ScheduledChunk, logits: Any) -> None:
        """Deliver what was asked about the prompt's tokens in ``chunk``."""
        sequence = chunk.sequence
        if sequence.context_row is not None:
            self._send_context(chunk, logits)
        if sequence.prompt_scores is not None:
            self._score(chunk, logits)
        if sequence.status == "running" and not sequence.reads_prompt and not sequence.generates:
            self._exits.finish(sequence, "length")

    def _send_context(self, chunk: ScheduledChunk, logits: Any) -> None:
        sequence = chunk.sequence
        row, end = sequence.context_row, min(sequence.num_computed, sequence.num_prompt)
        assert row is not None
        assert chunk.start <= row
        if end <= row:  # these rows were delivered before the sequence was preempted
            return
        wanted = logits[row - chunk.start : end - chunk.start]
        if not bool(torch.isfinite(wanted.amax(-1)).all()):
            self._exits.fail_not_finite(sequence)
            return
        self._inflight.emit_logits(sequence, "context", row, wanted)
        sequence.context_row = end if end < sequence.num_prompt else None

    def _score(self, chunk: ScheduledChunk, logits: Any) -> None:
        sequence = chunk.sequence
        scores = sequence.prompt_scores
        assert scores is not None
        del scores[chunk.start :]  # left by a step that failed and is run again
        scores.extend(score_prompt(logits, chunk.start, sequence))
        if sequence.num_computed < sequence.num_prompt:
            return
        sequence.prompt_scores = None
        if any(math.isnan(score.logprob) for score in scores):
            self._exits.fail_not_finite(sequence)
            return
        beams = sequence.group.beams
        for index in beams.indexes if isinstance(beams, BeamGroup) else (sequence.index,):
            self._inflight.emit(self._inflight.of(sequence), PromptScored(index, tuple(scores)))

    def _deliver_verified(self, chunk: ScheduledChunk, sampled: Sequence[Sampled], logits: Any) -> None:
        """Give a sequence the tokens of a step with drafts. The KV of accepted drafts is already in the cache."""
        sequence, speculation = chunk.sequence, self._scheduler.speculation
        if sequence.status != "running":
            return
        assert speculation is not None, "it made the drafts"
        first = sequence.num_tokens
        held = speculation.verify(sequence, sequence.slice(first, first + chunk.num_drafted).copy(), sampled)
        sequence.num_computed = first + len(held) - 1
        self._cache.computed(sequence.id, sequence.slice(0, sequence.num_computed), sequence.num_computed)
        self._deliver(sequence, held, logits)

    def _deliver(self, sequence: SequenceState, sampled: Sequence[Sampled], logits: Any) -> None:
        """Give a sequence the tokens of one step. ``logits`` are those they were drawn from, or None if the request
        does not want them."""
        if sequence.status != "running":  # a sibling failed the request in this very step
            return
        if any(one.token_id < 0 for one in sampled):
            self._deliver_before(sequence, sampled, logits)
            return
        before = sequence.num_tokens
        reason = sequence.extend(sampled)
        if sequence.timings is not None:
            sequence.note_step(self._began, time.monotonic(), self._batch_size)
        self._exits.count(sequence, sequence.num_tokens - before)
        if logits is not None:
            taken = logits[: sequence.num_tokens - before]
            self._inflight.emit_logits(sequence, "generation", before - sequence.num_prompt, taken)
        if sequence.grammar_state is not None:
            try:
                reason = self.follow(sequence, before, reason)
            except ServingError as error:
                self._exits.fail_grammar(sequence, error)
                return
        if reason is not None:
            self._exits.finish(sequence, reason)
        elif not sequence.may_hold:
            self._inflight.flush(sequence)

    def _deliver_before(self, sequence: SequenceState, sampled: Sequence[Sampled], logits: Any) -> None:
        """Give a sequence the tokens before the place at which none could be drawn. Unless they end it, it fails."""
        at = next(i for i, one in enumerate(sampled) if one.token_id < 0)
        if at:
            self._deliver(sequence, sampled[:at], logits)
        if sequence.status != "running":
            return
        if sampled[at].token_id == NO_ALLOWED_TOKEN:
            self._exits.fail(self._inflight.of(sequence), nothing_left(sequence.sampling))
        else:
            self._exits.fail_not_finite(sequence)

    def _search(self, group: SequenceGroup) -> None:
        """Take a step of a beam search."""
        beams = group.beams
        assert isinstance(beams, BeamGroup)
        if not group.members or group.members[0].status == "finished":  # a sibling failed the request in this step
            return
        first = group.members[0]
        first.charge(beams.width)
        try:
            made = beams.advance(self._cache, lambda: self._add_member(group, first.index))
        except FloatingPointError:
            self._exits.fail_not_finite(first)
            return
        except ServingError as error:
            if group.sampling.grammar is None:
                self._exits.fail(self._inflight.of(first), error)
            else:
                self._exits.fail_grammar(first, error)
            return
        for beam in made:
            self._scheduler.add(beam)
        settled = beams.settled() if group.request.stream and not beams.search.done else ()
        if settled:
            self._exits.count(first, sum(len(text.token_ids) for text in settled), charged=True)
            self._inflight.send_texts(first, settled)
        if beams.search.done or not beams.indexes:
            self._exits.finish(first, "stop")
