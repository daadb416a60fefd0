"""Which tokens the next forward runs.

Each step: first one token of every sequence that decodes, then prompts in chunks up to ``max_num_batched_tokens``.
Sequences start in order of (priority, arrival) as far as slots and memory for their whole prompt allow. Prompts being
read take turns with a share of the step each, so a long one delays the short ones behind it by little. When memory runs
out, the sequences that came last lose theirs and start again later (their tokens are kept, only KV is recomputed).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

from .kv_cache import KVCache
from .sequence import SequenceState

SHARES = 4  # prompts that share the prefill part of a step
MATCHES_PER_STEP = 16  # prompts compared with the prefix cache in one step: bounds the time a queue costs


@dataclass(frozen=True, slots=True)
class Run:
    """``num_tokens`` of ``sequence`` from ``start``; ``samples`` when the last of them is the last one known."""

    sequence: SequenceState
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_tokens


def _arrival(sequence: SequenceState) -> tuple[int, int]:
    return sequence.arrival


class Scheduler:
    def __init__(self, cache: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._turns: deque[SequenceState] = deque()  # running sequences with more than one token to compute
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self.num_preemptions = 0

    def add(self, sequence: SequenceState) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Run]:
        """The runs of the next step, single tokens first; empty when there is nothing to do."""
        runs = self._decodes()
        budget = self.max_num_batched_tokens - len(runs)
        # Prompts that wait for their first turn share with those that had one: at most half of the step while there are
        # such, so that neither kind waits for the other to be done.
        prefills = self._admit(budget // 2 if self._turns else budget)
        budget -= sum(run.num_tokens for run in prefills)
        prefills += self._turn_by_turn(budget)
        budget = self.max_num_batched_tokens - sum(run.num_tokens for run in runs + prefills)
        if budget > 0:
            prefills = self._fill(prefills, budget)
        for run in prefills:
            self._turns.append(run.sequence)
        return runs + prefills

    def _decodes(self) -> list[Run]:
        runs = []
        for sequence in list(self.running):
            if sequence.status != "running" or sequence.num_remaining > 1:
                continue
            if self._make_room(sequence):
                runs.append(Run(sequence, sequence.num_computed, 1))
        return runs

    def _make_room(self, sequence: SequenceState) -> bool:
        """Room for the sequence's next token, at the cost of those that came after it, or of itself."""
        while not self.cache.grow(sequence.id, sequence.num_tokens):
            last = self.running[-1]
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """running → waiting: its KV is given up and computed again later."""
        self._leave(sequence)
        self.cache.release(sequence.id, keep=False)
        sequence.move("waiting")
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def finish(self, sequence: SequenceState, *, keep: bool = True) -> None:
        """The one exit of a sequence, whatever state it is in; frees all it holds."""
        if sequence.status == "running":
            self._leave(sequence)
            self.cache.release(sequence.id, keep=keep)
        elif sequence.status == "waiting":
            self.waiting.remove(sequence)
        sequence.move("finished")

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        if sequence in self._turns:
            self._turns.remove(sequence)

    def _turn_by_turn(self, budget: int) -> list[Run]:
        """A share for each prompt being read; who was served goes behind the others (``schedule`` puts it there)."""
        share = max(budget // SHARES, 1)
        runs: list[Run] = []
        for _ in range(len(self._turns)):
            if budget <= 0:
                break
            sequence = self._turns.popleft()
            if sequence.num_remaining <= 1:  # it has joined those that decode
                continue
            run = Run(sequence, sequence.num_computed, min(sequence.num_remaining, share, budget))
            budget -= run.num_tokens
            runs.append(run)
        return runs

    def _admit(self, budget: int) -> list[Run]:
        share = max(self.max_num_batched_tokens // SHARES, 1)
        runs: list[Run] = []
        matches = 0
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_num_seqs or matches >= MATCHES_PER_STEP:
                break
            matches += 1
            if self._awaits_prefix(sequence):
                continue
            if not self._start(sequence):
                break  # in order of arrival: none behind it may take the memory it waits for
            run = Run(sequence, sequence.num_computed, min(sequence.num_remaining, share, budget))
            budget -= run.num_tokens
            runs.append(run)
        return runs

    def _awaits_prefix(self, sequence: SequenceState) -> bool:
        """Whether a running sequence is just computing what this one could copy (as for the choices of n > 1)."""
        if sequence.prompt_scores is not None:
            return False
        return self.cache.match(sequence.key, sequence.tokens)[1] is not None

    def _start(self, sequence: SequenceState) -> bool:
        reuse = sequence.prompt_scores is None
        cached = self.cache.acquire(sequence.id, sequence.key, sequence.tokens, reuse=reuse)
        if cached is None:
            return False
        self.waiting.remove(sequence)
        sequence.move("running")
        sequence.num_computed = cached
        insort(self.running, sequence, key=_arrival)
        if sequence.first_step_at is None:
            sequence.first_step_at = time.monotonic()
            sequence.num_cached = min(cached, sequence.num_prompt)
            self.prefix_hit_tokens += cached
            self.prefix_query_tokens += sequence.num_tokens
        return True

    def _fill(self, runs: list[Run], budget: int) -> list[Run]:
        """Give what is left of the step to those that can use it, first come first."""
        filled = []
        for run in runs:
            more = min(budget, run.sequence.num_remaining - run.num_tokens)
            budget -= more
            filled.append(Run(run.sequence, run.start, run.num_tokens + more))
        return filled
