"""Continuous batching: decides which tokens the next forward computes.

Each step: decodes first, one token of every sequence whose prompt is complete, then chunked prefill up to
``max_num_batched_tokens``. Sequences start in order of priority, fairly between tenants and in order of arrival within
one (``fair_queue``), as far as slots and memory for their whole prompt allow. Among started prompts, the one with the
fewest remaining tokens goes first, so that they complete one after the other instead of all of them late; the one that
started first is guaranteed a share of the step. When memory runs out, the sequences that started last are preempted and
start again later (their tokens are kept, only KV is recomputed).

Sequences are of three classes: provisioned, standard, and background ones of batches. While there are provisioned
sequences, a step is made of them alone in just that way. The others are best effort: they get the time that
``step_time_budget.BestEffortBudget`` allows beside them, in order of class and arrival, and give up slots and memory.
Without provisioned sequences, background ones are best effort beside standard ones in the same way, but not in steps
that a first token comes from."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ...interface.request import BACKGROUND, PROVISIONED, STANDARD
from ..attention.kv_cache import KVCache
from .batch_invariance import whole_pieces
from .fair_queue import FairQueue
from .sequence import BLOCKS_LATER, SamplePosition, SequenceGroup, SequenceState, WaitReason
from .speculation import MAX_STEP_ROWS, DraftedPosition, Speculation
from .step_time_budget import PROVISIONED_PACE, STANDARD_PACE, BestEffortBudget, StepLoad

MAX_FORCED_TOKENS_PER_STEP = 32  # tokens forced by a grammar that a sequence computes beside its next one
OLDEST_PREFILL_SHARE = 1 / 4  # part of a step's prefill tokens that is guaranteed to the prompt that started first
BACKGROUND_PREFILL_SHARE = 1 / 4  # part of a step's tokens in steps of background work: a request that comes waits less
ALL, NONE = range(BACKGROUND + 1), range(0)  # classes of sequences
MAX_MATCHES_PER_STEP = 16  # prompts looked up in the prefix cache in one step: bounds the cost of a queue


class ScheduledChunk(Struct, frozen=True):
    """``num_tokens`` of ``sequence`` from position ``start`` on; the last ``num_drafted`` of them are drafts."""

    sequence: SequenceState
    start: int
    num_tokens: int
    num_drafted: int = 0

    @property
    def num_known(self) -> int:
        """Return how many tokens of the chunk are not drafts."""
        return self.num_tokens - self.num_drafted

    @property
    def samples(self) -> bool:
        """Return whether the chunk has the last known token, so that the next one is sampled."""
        return self.start + self.num_known == self.sequence.num_tokens

    @property
    def sample_positions(self) -> tuple[SamplePosition, ...]:
        """Return where tokens are sampled after this chunk, in order: after the last known token, and after the
        drafts."""
        if not self.samples or not self.sequence.generates:
            return ()
        if not self.num_drafted:
            return (self.sequence,)
        return (self.sequence, *(DraftedPosition(self.sequence, i + 1) for i in range(self._num_drawn)))

    @property
    def _num_drawn(self) -> int:
        """Return how many drafts are followed by a position to sample at; within a grammar, the token after the last
        may be forced."""
        grammar_state = self.sequence.grammar_state
        if grammar_state is None or grammar_state.ahead is None or grammar_state.ahead.positions is None:
            return self.num_drafted
        return len(grammar_state.ahead.positions)

    @property
    def num_logits(self) -> int:
        """Return how many of its last tokens need logits: all if the prompt's are wanted, else one per sample
        position."""
        return self.num_tokens if self.sequence.reads_prompt else self.num_drafted + self.samples


def _shortest_first(sequence: SequenceState) -> tuple[int, int, int]:
    """Return the sort key of prompts: class, priority, remaining tokens."""
    return (*sequence.arrival[:2], sequence.num_remaining)


def _precedence(sequence: SequenceState) -> tuple[int, int, int, int]:
    """Return the order in which sequences keep their memory."""
    return sequence.precedence


class Scheduler:
    """The owner of every unfinished sequence of one engine, ``running`` in order of ``precedence``.

    At most ``max_num_seqs`` run at once; a step has at most ``max_num_batched_tokens`` tokens, decodes and prefills
    together. Of the ``prefix_query_tokens`` looked up, ``prefix_hit_tokens`` came from the prefix cache."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculation: Speculation | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.waiting = FairQueue()
        self.running: list[SequenceState] = []
        self.blocked: dict[int, SequenceState] = {}  # until their grammar is compiled and their images are encoded
        self.budget = BestEffortBudget()
        self._guarded = NONE  # the classes beside which others are best effort, in the last step planned
        self._lingering = PROVISIONED  # the highest class that ran in the last step with guarded sequences
        self._batch_invariant = batch_invariant  # chunks end at the fixed boundaries of ``batch_invariance``
        self.speculation = speculation
        self._searches: list[SequenceGroup] = []  # whose beams have started
        self._num_started = 0  # groups
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self.provisioned_prompt_tokens = 0
        self.num_preemptions = 0

    def add(self, sequence: SequenceState) -> None:
        """Accept a sequence, as waiting or blocked."""
        self.waiting.admit(sequence)
        if sequence.waits_for in ("grammar", "images"):
            self.blocked[sequence.id] = sequence
        else:
            self.waiting.add(sequence)

    def unblock(self, sequence: SequenceState) -> None:
        """Move a sequence whose prerequisites are met to the waiting queue."""
        if self.blocked.pop(sequence.id, None) is not None:
            sequence.waits_for = "turn"
            self.waiting.add(sequence)

    def has_work(self) -> bool:
        """Return whether any sequence may run; blocked ones may not."""
        return bool(self.waiting or self.running)

    @property
    def has_provisioned(self) -> bool:
        """Return whether there are provisioned sequences, which come first in ``running``."""
        return self.highest_class == PROVISIONED

    @property
    def highest_class(self) -> int:
        """Return the class of the sequences that run first, ``BACKGROUND`` if there are none."""
        running = (self.running[0].service_class,) if self.running else ()
        return min((*running, *self.waiting.classes), default=BACKGROUND)

    @property
    def num_provisioned(self) -> int:
        """Return the number of provisioned sequences, running and waiting."""
        return sum(s.provisioned for s in self.running) + sum(s.provisioned for s in self.waiting)

    def waiting_for(self) -> Counter[WaitReason]:
        """Return how many sequences wait, by the reason found when each was last considered."""
        return Counter(sequence.waits_for for sequence in chain(self.waiting, self.blocked.values()))

    def schedule(self) -> list[ScheduledChunk]:
        """Return the chunks of the next step, single tokens first; [] if there is nothing to do."""
        chunks = self._plan()
        if not self._batch_invariant:
            return chunks
        return [
            replace(
                chunk,
                num_tokens=whole_pieces(chunk.start, chunk.start + chunk.num_tokens, chunk.sequence.num_prompt)
                - chunk.start,
            )
            for chunk in chunks
        ]

    def _plan(self) -> list[ScheduledChunk]:
        self._guarded = self._classes_to_guard()
        if not self._guarded:
            return self._with_drafts(self._step(ALL), len(self.running) + len(self.waiting))
        chunks = self._step(self._guarded)
        if STANDARD in self._guarded:
            drafted = self._with_drafts(chunks, len(chunks))
            if drafted is not chunks:  # not measured, so nothing beside them could be paid for
                return drafted
            if not all(chunk.sequence.num_generated for chunk in chunks):
                return chunks  # a first token is awaited, which would be late by all that a step adds
        return sorted(chunks + self._best_effort(chunks), key=lambda chunk: chunk.num_tokens > 1)

    def _classes_to_guard(self) -> range:
        """Return the classes whose pace is kept in the next step beside those of all others; none if one class has the
        engine to itself."""
        lingers = self.budget.lingers
        if self.has_provisioned or (lingers and self._lingering == PROVISIONED):
            return range(STANDARD)
        has_background = bool(self.running) and self.running[-1].service_class == BACKGROUND
        if not has_background and BACKGROUND not in self.waiting.classes:
            return NONE
        return range(BACKGROUND) if lingers or self.highest_class == STANDARD else NONE

    def _with_drafts(self, chunks: list[ScheduledChunk], num_sequences: int) -> list[ScheduledChunk]:
        if self.speculation is None or num_sequences >= MAX_STEP_ROWS:
            return chunks
        return self.speculate(chunks, self.speculation)

    def following(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Plan the step after ``chunks``, single tokens that are still being computed: what ``schedule`` would return
        if none of them ended its sequence. Return [] if it might plan anything else, or if there is nothing to do."""
        if not chunks or len(chunks) < len(self.running):
            return []
        last = self.running[-1]
        if self.running[0].service_class != last.service_class:
            return []
        if self.budget.lingers and last.service_class > self._lingering:
            return []
        going = [
            chunk.sequence for chunk in chunks if chunk.sequence.num_generated + 1 < chunk.sequence.stop_rule.max_tokens
        ]
        if self.waiting and (len(going) < self.max_num_seqs or min(self.waiting.classes) < last.service_class):
            return []
        if not all(self.cache.grow(sequence.id, sequence.num_tokens + 1) for sequence in going):
            return []
        return [ScheduledChunk(sequence, sequence.num_tokens, 1) for sequence in going]

    def record_step_time(self, chunks: Sequence[ScheduledChunk], seconds: float) -> None:
        """Record that ``chunks`` took ``seconds``, to plan the next steps by."""
        if chunks and not any(chunk.num_drafted for chunk in chunks):
            guarded = [chunk for chunk in chunks if chunk.sequence.service_class in self._guarded]
            if guarded:
                self._lingering = min(chunk.sequence.service_class for chunk in guarded)
            pace = PROVISIONED_PACE if self._lingering == PROVISIONED else STANDARD_PACE
            self.budget.record_step_time(StepLoad.of(guarded), StepLoad.of(chunks), seconds, pace=pace)
        if chunks and not self._guarded and chunks[0].sequence.service_class == STANDARD:  # alone, and not for long
            self._lingering = STANDARD
            self.budget.expect_more(STANDARD_PACE)

    def _step(self, classes: range) -> list[ScheduledChunk]:
        """Plan a whole step of some classes of sequences."""
        before = self.num_preemptions
        chunks = self._decodes(classes)
        budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        if self.highest_class == BACKGROUND:
            budget = min(budget, max(int(self.max_num_batched_tokens * BACKGROUND_PREFILL_SHARE), 1))
        prefills = self._prefills(budget, classes)
        if self.num_preemptions > before:  # a beam that started may have taken the memory of others
            chunks, prefills = [
                [chunk for chunk in some if chunk.sequence.status == "running"] for some in (chunks, prefills)
            ]
        return chunks + prefills

    def _decodes(self, classes: range) -> list[ScheduledChunk]:
        chunks, before = [], self.num_preemptions
        spare = self.max_num_batched_tokens - len(self.running)
        for sequence in list(self.running):
            if sequence.service_class not in classes or sequence.status != "running" or not sequence.decodes:
                continue
            if self._allocate_next(sequence):
                num_tokens = 1
                if sequence.num_remaining > 1:
                    num_tokens += min(sequence.num_remaining - 1, MAX_FORCED_TOKENS_PER_STEP, spare)
                    spare -= num_tokens - 1
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, num_tokens))
        if self.num_preemptions > before:  # beams may have been preempted along with a later one
            chunks = [chunk for chunk in chunks if chunk.sequence.status == "running"]
        return chunks

    def speculate(self, chunks: list[ScheduledChunk], speculation: Speculation) -> list[ScheduledChunk]:
        """Add drafts to ``chunks``, if all are single tokens, up to ``MAX_STEP_ROWS`` rows."""
        if any(chunk.num_tokens > 1 for chunk in chunks):
            return chunks
        sequences = [r.sequence for r in chunks if r.sequence.group.beams is None and not r.sequence.reads_prompt]
        found = speculation.drafts(sequences, MAX_STEP_ROWS - len(chunks)) if sequences else []
        num_drafted = {}
        for sequence, drafts in zip(sequences, found, strict=True):
            if len(drafts) and self.cache.grow(sequence.id, sequence.num_tokens + len(drafts)):
                sequence.draft(drafts)
                num_drafted[sequence.id] = len(drafts)
            elif sequence.grammar_state is not None:
                sequence.grammar_state.ahead = None
        if not num_drafted:
            return chunks
        drafted = [
            ScheduledChunk(chunk.sequence, chunk.start, 1 + count, count)
            if (count := num_drafted.get(chunk.sequence.id, 0))
            else chunk
            for chunk in chunks
        ]
        return sorted(drafted, key=lambda chunk: chunk.num_tokens > 1)

    def _allocate_next(self, sequence: SequenceState) -> bool:
        """Allocate KV for the next token; preempt the sequences that started last until it fits. Return False if that
        includes ``sequence`` itself."""
        while not self.cache.grow(sequence.id, sequence.num_tokens):
            self.preempt(self.running[-1])
            if sequence.status != "running":
                return False
        return True

    def preempt(self, sequence: SequenceState, *, keep: bool = False) -> None:
        """Move a running sequence back to waiting. Its KV is released; with ``keep``, it stays in the prefix cache
        until the memory is needed. Beams are preempted together, since a search cannot go on with some of them."""
        group = sequence.group
        if group.beams is None:
            self._preempt(sequence, keep)
            return
        for beam in [one for one in group.members if one.status == "running"]:
            self._preempt(beam, keep)
        group.beams.preempted()
        self._searches.remove(group)

    def _preempt(self, sequence: SequenceState, keep: bool) -> None:
        self._leave(sequence)
        self.cache.release(sequence.id, keep=keep)
        sequence.move("waiting")
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence, again=True)

    def finish(self, sequence: SequenceState, *, keep: bool = True) -> None:
        """Finish a sequence in whatever state it is, and free its resources."""
        if sequence.status == "running":
            self._leave(sequence)
            self.cache.release(sequence.id, keep=keep)
        elif self.blocked.pop(sequence.id, None) is None and sequence.status == "waiting":
            self.waiting.remove(sequence)
        self.waiting.forget(sequence)
        sequence.move("finished")
        if sequence.group.beams is not None and sequence.group in self._searches:
            self._searches.remove(sequence.group)  # all beams of a search end together

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)

    def _prefills(self, budget: int, classes: range) -> list[ScheduledChunk]:
        """Plan parts of prompts, at most ``budget`` tokens in all. Those that start now get at most half of it while
        others need the rest."""
        resumed = [s for s in self.running if s.service_class in classes and s.num_remaining and not s.decodes]
        half, share = budget // 2 if resumed else budget, max(int(budget * OLDEST_PREFILL_SHARE), 1)
        started = self._admit(half, share, classes)
        resumed = [s for s in resumed if s.status == "running"]  # some may have been preempted for one that started
        parts = dict.fromkeys([*resumed, *started], 0)
        left = budget

        def give(sequence: SequenceState, max_tokens: int) -> int:
            nonlocal left
            part = min(sequence.num_remaining - parts[sequence], max_tokens, left)
            parts[sequence] += part
            left -= part
            return part

        if resumed:
            give(resumed[0], share)
        for sequence in sorted(parts, key=_shortest_first):
            if sequence not in started:
                give(sequence, budget)
            else:
                half -= give(sequence, half)
        for sequence in started:
            give(sequence, budget)
        return [ScheduledChunk(sequence, sequence.num_computed, part) for sequence, part in parts.items() if part]

    def _admit(self, budget: int, share: int, classes: range) -> list[SequenceState]:
        """Admit waiting sequences while the token budget lasts, counting each at most ``share``."""
        started: list[SequenceState] = []
        for sequence in self._candidates(classes):
            if budget <= 0:
                break
            if not self._start(sequence):
                break  # in order: a later one must not take the memory that this one waits for
            budget -= min(sequence.num_remaining, share)
            started.append(sequence)
        return started

    def _candidates(self, classes: range) -> Iterator[SequenceState]:
        """Yield waiting sequences that may start now, looking at no more than ``MAX_MATCHES_PER_STEP``. Beams of
        started searches come first, since the sequences before them may be waiting for the very slots and memory that
        these will free."""
        waiting = self.waiting.front(classes, MAX_MATCHES_PER_STEP)
        if self._searches and (begun := self._begun_beams(classes)):
            waiting = [*begun, *(sequence for sequence in waiting if sequence not in begun)]
        for sequence in waiting:
            sequence.waits_for = self._wait_reason(sequence)
            if sequence.waits_for in BLOCKS_LATER:
                return
            if sequence.waits_for != "turn":
                continue
            while self._is_full(sequence):
                self._displace()
            yield sequence

    def _begun_beams(self, classes: range) -> list[SequenceState]:
        beams = (beam for group in self._searches for beam in group.members)
        return [beam for beam in beams if beam.status == "waiting" and beam.service_class in classes]

    def _wait_reason(self, sequence: SequenceState) -> WaitReason:
        """Return what keeps a sequence from starting in this step, "turn" if nothing does. ``_start`` finds out whether
        memory suffices."""
        if self._is_full(sequence) and not self._could_place(sequence):
            return "slot"
        return "prefix" if self._awaits_prefix(sequence) else "turn"

    def _is_full(self, sequence: SequenceState) -> bool:
        """Return whether there are too few free slots for ``sequence`` and the beams that start with it."""
        return self._taken(self.running) + self._places(sequence) > self.max_num_seqs

    def _taken(self, running: Sequence[SequenceState]) -> int:
        """Return the slots that ``running`` take: one each, and for a search all that its beams need."""
        if not self._searches:
            return len(running)
        searches = {id(s.group): s.group.beams.width for s in running if s.group.beams is not None}
        return sum(s.group.beams is None for s in running) + sum(searches.values())

    def _places(self, sequence: SequenceState) -> int:
        beams = sequence.group.beams
        if beams is None:
            return 1
        return 0 if sequence.group in self._searches else beams.width

    def _could_place(self, sequence: SequenceState) -> bool:
        """Return whether preempting sequences of lower classes would free enough slots for this one."""
        if not self._can_displace(sequence):
            return False
        kept = [s for s in self.running if s.service_class <= sequence.service_class]
        return self._taken(kept) + self._places(sequence) <= self.max_num_seqs

    def _can_displace(self, sequence: SequenceState) -> bool:
        return bool(self.running) and self.running[-1].service_class > sequence.service_class

    def _displace(self) -> None:
        """Preempt the sequence that started last, in favour of one of a higher class."""
        self.preempt(self.running[-1], keep=True)

    def _awaits_prefix(self, sequence: SequenceState) -> bool:
        """Return whether a running sequence is computing a prefix that this one could copy (as for the choices of n >
        1).

        A sequence does not wait for the work of a lower class, which may take long."""
        if sequence.max_reuse is not None:
            return False
        owner = self.cache.match(sequence.key, sequence.tokens)[1]
        if owner is None or sequence.service_class == BACKGROUND:
            return owner is not None
        return any(s.id == owner and s.service_class <= sequence.service_class for s in self.running)

    def _start(self, sequence: SequenceState) -> bool:
        cached = self._acquire(sequence)
        while cached is None and (self._can_displace(sequence) or self._can_take_from(sequence)):
            self._displace()
            cached = self._acquire(sequence)
        if cached is None:
            sequence.waits_for = "memory"
            return False
        self.waiting.remove(sequence)
        sequence.move("running")
        sequence.num_computed = cached
        if not sequence.group.started:
            self._num_started += 1
            sequence.group.started = self._num_started
        insort(self.running, sequence, key=_precedence)
        sequence.forked_from = None
        if sequence.group.beams is not None and sequence.group not in self._searches:
            self._searches.append(sequence.group)
        if sequence.first_step_at is None:
            sequence.num_cached = max(min(cached, sequence.num_prompt) - sequence.group.num_learned, 0)
            if not sequence.num_resumed:  # else its prompt was charged when it was first admitted
                sequence.tenant.used += (sequence.num_prompt - sequence.num_cached) * sequence.token_cost
            sequence.first_step_at = time.monotonic()
            self.prefix_hit_tokens += cached
            self.provisioned_prompt_tokens += sequence.num_prompt * sequence.provisioned
            self.prefix_query_tokens += sequence.num_tokens
        return True

    def _can_take_from(self, sequence: SequenceState) -> bool:
        """Return whether a beam of a started search may take the memory of the sequence that started last, as running
        sequences may. Otherwise two searches could wait for each other's memory forever."""
        group = sequence.group
        if group not in self._searches or self.running[-1].group is group:
            return False
        return self.running[-1].precedence > sequence.precedence

    def _acquire(self, sequence: SequenceState) -> int | None:
        source = sequence.forked_from
        if source is not None and source.status != "running":
            source = sequence.forked_from = None
        return self.cache.acquire(
            sequence.id,
            sequence.key,
            sequence.tokens,
            at_most=sequence.max_reuse,
            source=source.id if source else None,
            fixed=None if sequence.group.beams is None else sequence.num_prompt,
        )

    def _best_effort(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Fill the step's remaining time with best-effort sequences, in order of arrival.

        If ``chunks`` is empty there is always one more chunk, so that no step is empty while there is work."""
        provisioned = StepLoad.of(chunks)
        seconds = self.budget.allowance(provisioned)
        budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        extra: list[ScheduledChunk] = []
        before = self.num_preemptions
        for sequence in self._best_effort_sequences():
            must = not chunks and not extra
            num_tokens = self._affordable(sequence, provisioned, seconds, budget)
            if num_tokens < 1 and not must:
                break
            if sequence.status == "waiting" and not self._start(sequence):
                break
            if sequence.decodes and not self._allocate_next(sequence):
                break
            num_tokens = max(1, min(num_tokens, sequence.num_remaining))
            chunk = ScheduledChunk(sequence, sequence.num_computed, num_tokens)
            extra.append(chunk)
            budget -= num_tokens
            seconds -= self._price(chunk, provisioned)
        if self.num_preemptions > before:  # beams are preempted together, and may have started again
            latest = {chunk.sequence.id: chunk for chunk in extra}
            extra = [chunk for chunk in latest.values() if chunk.start == chunk.sequence.num_computed]
            extra = [chunk for chunk in extra if chunk.sequence.status == "running"]
        return extra

    def _best_effort_sequences(self) -> Iterator[SequenceState]:
        others = range(self._guarded.stop, len(ALL))
        for sequence in [s for s in self.running if s.service_class in others]:
            if sequence.status == "running" and sequence.num_remaining:  # it may have been preempted for an earlier one
                yield sequence
        if not self.waiting.classes.intersection(self._guarded):
            yield from self._candidates(others)

    def _affordable(self, sequence: SequenceState, provisioned: StepLoad, seconds: float, budget: int) -> int:
        """Return how many tokens of ``sequence`` fit into ``seconds``; a waiting one is priced as if nothing were
        cached."""
        if seconds <= 0:
            return 0
        start = sequence.num_computed
        num_tokens = 1 if self.budget.row(provisioned, start) <= seconds else 0
        if sequence.num_remaining > 1:
            num_tokens = max(num_tokens, self.budget.chunk_tokens(provisioned, start, seconds))
        return min(num_tokens, sequence.num_remaining, budget)

    def _price(self, chunk: ScheduledChunk, provisioned: StepLoad) -> float:
        row = self.budget.row(provisioned, chunk.start)
        if chunk.num_tokens == 1:
            return row
        return min(self.budget.cost.chunk(chunk.start, chunk.num_tokens), row * chunk.num_tokens)
