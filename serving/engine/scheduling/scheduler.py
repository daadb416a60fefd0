"""Continuous batching: which tokens the next forward runs.

Each step: decode first, one token of every sequence that has its prompt, then chunked prefill up to
``max_num_batched_tokens``. Sequences start in order of priority, fairly between tenants and in order of arrival within
one (``fair_queue``), as far as slots and memory for their whole prompt allow. Of prompts that have started the one with
least left goes first, so that they end one after the other rather than all of them late; the one that started first has
a share of the step whatever comes after it. When memory runs out, the sequences that started last are preempted and
start again later (their tokens are kept, only KV is recomputed).

While provisioned sequences are there, a step is made of them alone in just that way. The others are best effort: they
get the time that ``best_effort.BestEffortBudget`` allows beside it, in order of arrival, and give up slots and memory.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..attention.kv_cache import KVCache
from .batch_invariance import whole_pieces
from .fair_queue import FairQueue
from .sequence import SHARED, Place, SequenceGroup, SequenceState, WaitReason
from .speculation import ROWS, DraftedPlace, Speculation
from .step_time_budget import BestEffortBudget, StepLoad

FORWARD = 32  # tokens that a grammar has decided, computed in a step beside one for every other sequence
SHARES = 4  # one of so many, of the prefill part of a step, is for the prompt that started first
MATCHES_PER_STEP = 16  # prompts compared with the prefix cache in one step: bounds the time a queue costs


@dataclass(frozen=True, slots=True)
class Run:
    """``num_tokens`` of ``sequence`` from position ``start`` on; the last ``num_drafted`` of them are drafts."""

    sequence: SequenceState
    start: int
    num_tokens: int
    num_drafted: int = 0

    @property
    def num_known(self) -> int:
        """Tokens of the run that are no drafts."""
        return self.num_tokens - self.num_drafted

    @property
    def samples(self) -> bool:
        """Whether it has the last token known, so that the next one is to be drawn."""
        return self.start + self.num_known == self.sequence.num_tokens

    @property
    def places(self) -> tuple[Place, ...]:
        """Where tokens are drawn after this run, in order: the last token known, and the drafts after it."""
        if not self.samples or not self.sequence.generates:
            return ()
        if not self.num_drafted:
            return (self.sequence,)
        return (self.sequence, *(DraftedPlace(self.sequence, i + 1) for i in range(self._num_drawn)))

    @property
    def _num_drawn(self) -> int:
        """Places after drafts where a token can be drawn: within a grammar it may decide what follows the last."""
        matching = self.sequence.matching
        if matching is None or matching.ahead is None or matching.ahead.places is None:
            return self.num_drafted
        return len(matching.ahead.places)

    @property
    def num_logits(self) -> int:
        """How many of its last tokens need logits: all while those of the prompt do, else one for each place."""
        return self.num_tokens if self.sequence.reads_prompt else self.num_drafted + self.samples


def _shortest_first(sequence: SequenceState) -> tuple[bool, int, int]:
    """Of prompts: by provisioned and priority, then by what is left of them."""
    return (*sequence.arrival[:2], sequence.num_remaining)


def _precedence(sequence: SequenceState) -> tuple[bool, int, int, int]:
    return sequence.precedence


class Scheduler:
    """Owns every unfinished sequence of one engine, ``running`` in order of ``precedence``.

    ``max_num_seqs`` run at once; a step has at most ``max_num_batched_tokens`` tokens, decodes and prefills together.
    ``prefix_hit_tokens`` of the ``prefix_query_tokens`` looked up came from the prefix cache.
    """

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
        self.held: dict[int, SequenceState] = {}  # until their grammars are compiled and their pictures read
        self.budget = BestEffortBudget()
        self._batch_invariant = batch_invariant  # runs end where pieces do (``batch_invariance``)
        self.speculation = speculation
        self._searches: list[SequenceGroup] = []  # whose beams have begun to run
        self._num_started = 0  # groups
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self.provisioned_prompt_tokens = 0
        self.num_preemptions = 0

    def add(self, sequence: SequenceState) -> None:
        """Take on a sequence as waiting for its turn."""
        self.waiting.admit(sequence)
        if sequence.waits_for in ("grammar", "pictures"):
            self.held[sequence.id] = sequence
        else:
            self.waiting.add(sequence)

    def let_go(self, sequence: SequenceState) -> None:
        """Its grammar is there: it waits for its turn, where it has one."""
        if self.held.pop(sequence.id, None) is not None:
            sequence.waits_for = "turn"
            self.waiting.add(sequence)

    def has_work(self) -> bool:
        """Whether there is a sequence that may run: those that are held may not."""
        return bool(self.waiting or self.running)

    @property
    def has_provisioned(self) -> bool:
        """Whether there are provisioned sequences, which are the first of those that run."""
        return bool(self.running and self.running[0].provisioned) or self.waiting.has_provisioned

    @property
    def num_provisioned(self) -> int:
        """Provisioned sequences, running and waiting."""
        return sum(s.provisioned for s in self.running) + sum(s.provisioned for s in self.waiting)

    def waiting_for(self) -> Counter[WaitReason]:
        """How many sequences wait, by what each waited for when it was last its turn to be looked at."""
        return Counter(sequence.waits_for for sequence in chain(self.waiting, self.held.values()))

    def schedule(self) -> list[Run]:
        """The runs of the next step, single tokens first; empty when there is nothing to do."""
        runs = self._plan()
        if not self._batch_invariant:
            return runs
        return [
            replace(
                run, num_tokens=whole_pieces(run.start, run.start + run.num_tokens, run.sequence.num_prompt) - run.start
            )
            for run in runs
        ]

    def _plan(self) -> list[Run]:
        if not self.has_provisioned and not self.budget.lingers:
            runs = self._step(False)
            if self.speculation is None or len(self.running) + len(self.waiting) >= ROWS:
                return runs
            return self._speculate(runs, self.speculation)
        runs = self._step(True)
        return sorted(runs + self._best_effort(runs), key=lambda run: run.num_tokens > 1)

    def following(self, runs: Sequence[Run]) -> list[Run]:
        """The step after ``runs``, single tokens that are being computed and not known yet: what ``schedule`` would
        plan if none of them ended its text. Empty where it might plan anything else, or there is nothing more to do."""
        if not runs or len(runs) < len(self.running):
            return []
        last = self.running[-1]
        if self.running[0].provisioned != last.provisioned or (self.budget.lingers and not last.provisioned):
            return []
        going = [run.sequence for run in runs if run.sequence.num_generated + 1 < run.sequence.stop_rule.max_tokens]
        if self.waiting and (len(going) < self.max_num_seqs or (self.waiting.has_provisioned and not last.provisioned)):
            return []
        if not all(self.cache.grow(sequence.id, sequence.num_tokens + 1) for sequence in going):
            return []
        return [Run(sequence, sequence.num_tokens, 1) for sequence in going]

    def ran(self, runs: Sequence[Run], seconds: float) -> None:
        """``runs`` took ``seconds``: what the next steps are planned by."""
        if runs and not any(run.num_drafted for run in runs):
            provisioned = StepLoad.of(run for run in runs if run.sequence.provisioned)
            self.budget.ran(provisioned, StepLoad.of(runs), seconds)

    def _step(self, provisioned: bool) -> list[Run]:
        """A whole step of one class of sequences."""
        before = self.num_preemptions
        runs = self._decodes(provisioned)
        budget = self.max_num_batched_tokens - sum(run.num_tokens for run in runs)
        prefills = self._prefills(budget, provisioned)
        if self.num_preemptions > before:  # a beam that started may have taken the memory of what was looked at
            runs, prefills = [[run for run in some if run.sequence.status == "running"] for some in (runs, prefills)]
        return runs + prefills

    def _decodes(self, provisioned: bool) -> list[Run]:
        runs, before = [], self.num_preemptions
        spare = self.max_num_batched_tokens - len(self.running)
        for sequence in list(self.running):
            if sequence.provisioned != provisioned or sequence.status != "running" or not sequence.decodes:
                continue
            if self._make_room(sequence):
                num_tokens = 1
                if sequence.num_remaining > 1:
                    num_tokens += min(sequence.num_remaining - 1, FORWARD, spare)
                    spare -= num_tokens - 1
                runs.append(Run(sequence, sequence.num_computed, num_tokens))
        if self.num_preemptions > before:  # beams that were looked at may have been preempted with a later one
            runs = [run for run in runs if run.sequence.status == "running"]
        return runs

    def _speculate(self, runs: list[Run], speculation: Speculation) -> list[Run]:
        """``runs`` with drafts, where all are single tokens: as many as make ``ROWS`` rows in all."""
        if any(run.num_tokens > 1 for run in runs):
            return runs
        sequences = [r.sequence for r in runs if r.sequence.group.beams is None and not r.sequence.reads_prompt]
        found = speculation.drafts(sequences, ROWS - len(runs)) if sequences else []
        num_drafted = {}
        for sequence, drafts in zip(sequences, found, strict=True):
            if len(drafts) and self.cache.grow(sequence.id, sequence.num_tokens + len(drafts)):
                sequence.draft(drafts)
                num_drafted[sequence.id] = len(drafts)
            elif sequence.matching is not None:
                sequence.matching.ahead = None
        if not num_drafted:
            return runs
        drafted = [
            Run(run.sequence, run.start, 1 + count, count) if (count := num_drafted.get(run.sequence.id, 0)) else run
            for run in runs
        ]
        return sorted(drafted, key=lambda run: run.num_tokens > 1)

    def _make_room(self, sequence: SequenceState) -> bool:
        """Room for the sequence's next token, at the cost of those that started after it, or of itself."""
        while not self.cache.grow(sequence.id, sequence.num_tokens):
            self.preempt(self.running[-1])
            if sequence.status != "running":
                return False
        return True

    def preempt(self, sequence: SequenceState, *, keep: bool = False) -> None:
        """running → waiting: its KV is given up, or with ``keep`` stays for reuse until its room is needed. Beams lose
        theirs together: a search that has some of its places only would keep them for nothing."""
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
        """The one exit of a sequence, whatever state it is in; frees all it holds."""
        if sequence.status == "running":
            self._leave(sequence)
            self.cache.release(sequence.id, keep=keep)
        elif self.held.pop(sequence.id, None) is None and sequence.status == "waiting":
            self.waiting.remove(sequence)
        self.waiting.forget(sequence)
        sequence.move("finished")
        if sequence.group.beams is not None and sequence.group in self._searches:
            self._searches.remove(sequence.group)  # a search ends with all of its beams

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)

    def _prefills(self, budget: int, provisioned: bool) -> list[Run]:
        """Parts of prompts, ``budget`` tokens in all; those that start now have half of it at most while there are
        others that need it."""
        begun = [s for s in self.running if s.provisioned == provisioned and s.num_remaining and not s.decodes]
        half, share = budget // 2 if begun else budget, max(budget // SHARES, 1)
        started = self._admit(half, share, provisioned)
        begun = [s for s in begun if s.status == "running"]  # it may have made room for one that started
        parts = dict.fromkeys([*begun, *started], 0)
        left = budget

        def give(sequence: SequenceState, most: int) -> int:
            nonlocal left
            part = min(sequence.num_remaining - parts[sequence], most, left)
            parts[sequence] += part
            left -= part
            return part

        if begun:
            give(begun[0], share)
        for sequence in sorted(parts, key=_shortest_first):
            if sequence not in started:
                give(sequence, budget)
            else:
                half -= give(sequence, half)
        for sequence in started:
            give(sequence, budget)
        return [Run(sequence, sequence.num_computed, part) for sequence, part in parts.items() if part]

    def _admit(self, budget: int, share: int, provisioned: bool) -> list[SequenceState]:
        """Start as many as had ``budget`` tokens between them if none took more than a share."""
        started: list[SequenceState] = []
        for sequence in self._candidates(provisioned):
            if budget <= 0:
                break
            if not self._start(sequence):
                break  # in their order: no later one may take the memory it waits for
            budget -= min(sequence.num_remaining, share)
            started.append(sequence)
        return started

    def _candidates(self, provisioned: bool) -> Iterator[SequenceState]:
        """Waiting sequences that may start now, as far as it is worth looking in one step. Beams of searches that have
        begun come first: what waits before them may wait for the very places and memory that these are to give back."""
        waiting = self.waiting.front(provisioned, MATCHES_PER_STEP)
        if self._searches and (begun := self._begun_beams(provisioned)):
            waiting = [*begun, *(sequence for sequence in waiting if sequence not in begun)]
        for sequence in waiting:
            sequence.waits_for = self._wait_reason(sequence)
            if sequence.waits_for in SHARED:
                return
            if sequence.waits_for != "turn":
                continue
            while self._is_full(sequence):
                self._displace()
            yield sequence

    def _begun_beams(self, provisioned: bool) -> list[SequenceState]:
        beams = (beam for group in self._searches for beam in group.members)
        return [beam for beam in beams if beam.status == "waiting" and beam.provisioned == provisioned]

    def _wait_reason(self, sequence: SequenceState) -> WaitReason:
        """What keeps it from starting in this step, "turn" for nothing; whether memory suffices ``_start`` sees."""
        if self._is_full(sequence) and not self._could_place(sequence):
            return "slot"
        return "prefix" if self._awaits_prefix(sequence) else "turn"

    def _is_full(self, sequence: SequenceState) -> bool:
        """Whether the places that are left are not enough for ``sequence``, and for the beams that start with it."""
        return self._taken(self.running) + self._places(sequence) > self.max_num_seqs

    def _taken(self, running: Sequence[SequenceState]) -> int:
        """Places that ``running`` take: one each, but all that their searches need for beams."""
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
        """Whether preempting best-effort sequences would make enough places for a provisioned one."""
        if not sequence.provisioned:
            return False
        kept = [s for s in self.running if s.provisioned]
        return self._taken(kept) + self._places(sequence) <= self.max_num_seqs

    def _can_displace(self, sequence: SequenceState) -> bool:
        return sequence.provisioned and bool(self.running) and not self.running[-1].provisioned

    def _displace(self) -> None:
        """Preempt the best-effort sequence that started last, for the sake of a provisioned one."""
        self.preempt(self.running[-1], keep=True)

    def _awaits_prefix(self, sequence: SequenceState) -> bool:
        """Whether a running sequence is just computing what this one could copy (as for the choices of n > 1).

        A provisioned one does not wait for best-effort work, which may take long.
        """
        if sequence.max_reuse is not None:
            return False
        owner = self.cache.match(sequence.key, sequence.tokens)[1]
        if owner is None or not sequence.provisioned:
            return owner is not None
        return any(s.id == owner and s.provisioned for s in self.running)

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
            if not sequence.num_resumed:  # else its prompt was charged when it was let in
                sequence.tenant.used += (sequence.num_prompt - sequence.num_cached) * sequence.token_cost
            sequence.first_step_at = time.monotonic()
            self.prefix_hit_tokens += cached
            self.provisioned_prompt_tokens += sequence.num_prompt * sequence.provisioned
            self.prefix_query_tokens += sequence.num_tokens
        return True

    def _can_take_from(self, sequence: SequenceState) -> bool:
        """Whether a beam whose search has begun may take the memory of what started last, as running sequences may: two
        searches would wait for each other's memory for ever."""
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

    def _best_effort(self, runs: list[Run]) -> list[Run]:
        """What else goes into a step of ``runs``: first come first, each as much as the time that is left allows.

        With nothing else in the step there is always one piece, so that no step is empty while there is work.
        """
        provisioned = StepLoad.of(runs)
        seconds = self.budget.allowance(provisioned)
        budget = self.max_num_batched_tokens - sum(run.num_tokens for run in runs)
        extra: list[Run] = []
        before = self.num_preemptions
        for sequence in self._best_effort_sequences():
            must = not runs and not extra
            num_tokens = self._affordable(sequence, provisioned, seconds, budget)
            if num_tokens < 1 and not must:
                break
            if sequence.status == "waiting" and not self._start(sequence):
                break
            if sequence.decodes and not self._make_room(sequence):
                break
            num_tokens = max(1, min(num_tokens, sequence.num_remaining))
            run = Run(sequence, sequence.num_computed, num_tokens)
            extra.append(run)
            budget -= num_tokens
            seconds -= self._price(run, provisioned)
        if self.num_preemptions > before:  # one of a search takes all of its beams along; they may have started anew
            latest = {run.sequence.id: run for run in extra}
            extra = [run for run in latest.values() if run.start == run.sequence.num_computed]
            extra = [run for run in extra if run.sequence.status == "running"]
        return extra

    def _best_effort_sequences(self) -> Iterator[SequenceState]:
        for sequence in [s for s in self.running if not s.provisioned]:
            if sequence.status == "running" and sequence.num_remaining:  # it may have lost its memory to one before it
                yield sequence
        if not self.waiting.has_provisioned:
            yield from self._candidates(False)

    def _affordable(self, sequence: SequenceState, provisioned: StepLoad, seconds: float, budget: int) -> int:
        """Tokens of ``sequence`` that ``seconds`` pay for; those of a waiting one as if nothing were cached."""
        if seconds <= 0:
            return 0
        start = sequence.num_computed
        num_tokens = 1 if self.budget.row(provisioned, start) <= seconds else 0
        if sequence.num_remaining > 1:
            num_tokens = max(num_tokens, self.budget.chunk_tokens(provisioned, start, seconds))
        return min(num_tokens, sequence.num_remaining, budget)

    def _price(self, run: Run, provisioned: StepLoad) -> float:
        row = self.budget.row(provisioned, run.start)
        if run.num_tokens == 1:
            return row
        return min(self.budget.cost.chunk(run.start, run.num_tokens), row * run.num_tokens)
