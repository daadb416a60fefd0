"""Diverse beam search (Vijayakumar et al. 2018): groups of beams that are penalised for the tokens of earlier groups.

The rules are those of transformers 4.55 (``_group_beam_search``, ``BeamSearchScorer``, Hamming diversity), the last
release that had it. In each step the groups choose one after the other. Each group keeps its own hypotheses, and the
best of all are the result. As in transformers, a request's biases, penalties and bans are applied after the diversity
penalty, so a repetition penalty multiplies that too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ...interface.request import EarlyStopping
from .beam_search import DEAD, NONE, Ending, Fork, Hypothesis, Note, Process, RunningBeams, Trail


class _Group:
    """One group's beams, by their places in the search, and its best hypotheses."""

    def __init__(self, size: int, early_stopping: EarlyStopping, length_penalty: float, max_tokens: int) -> None:
        self.size = size
        self.scores = np.full(size, NONE, dtype=np.float32)
        self.scores[0] = 0.0
        self.hypotheses: list[Hypothesis] = []
        self.done = False
        self._early, self._penalty, self._max_tokens = early_stopping, length_penalty, max_tokens

    @property
    def worst(self) -> float:
        return min((one.score for one in self.hypotheses), default=1e9)

    def add(self, token_ids: tuple[int, ...], total: float, length: int, trail: Trail | None) -> None:
        """Keep a text that has ended, or was cut, if it is among the best ``size``."""
        score = total / length**self._penalty
        if len(self.hypotheses) >= self.size:
            if score <= self.worst:
                return
            self.hypotheses.remove(min(self.hypotheses, key=lambda one: one.score))
        self.hypotheses.append(Hypothesis(token_ids, score, Trail.notes(trail)))

    def bound(self, length: int) -> float:
        """Return the upper bound on the scores of hypotheses still to come from beams of ``length`` tokens."""
        if self.done:
            return -np.inf
        return float(self.scores.max()) / (self._max_tokens if self._penalty > 0.0 else length) ** self._penalty

    def judge(self, best: float, length: int) -> None:
        """Decide whether the group is done. ``best`` is the greatest sum of log probabilities among this step's
        candidates, which have ``length`` tokens."""
        if self.done or len(self.hypotheses) < self.size:
            return
        if self._early == "first":
            self.done = True
            return
        longest = self._early == "never" and self._penalty > 0.0
        self.done = self.worst >= best / (self._max_tokens if longest else length) ** self._penalty


class GroupBeamSearch(RunningBeams):
    """A search like ``BeamSearch``, but with ``num_groups`` groups of ``width // num_groups`` beams of one prompt.

    ``filler`` is the token that the beams of a finished group count as for the diversity of later groups (transformers
    pads them).
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        ends: Collection[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
        *,
        num_groups: int,
        diversity_penalty: float,
        filler: int,
    ) -> None:
        super().__init__(width)
        self._max_tokens = max_tokens
        self._ends = frozenset(ends)
        self._diversity = np.float32(diversity_penalty)
        self._filler = filler
        self._size = width // num_groups
        self._groups = [_Group(self._size, early_stopping, length_penalty, max_tokens) for _ in range(num_groups)]

    def is_alive(self, beam: int) -> bool:
        group, place = self._place(beam)
        return not group.done and bool(group.scores[place] > DEAD)

    def complete(self, beam: int) -> None:
        group, place = self._place(beam)
        total = float(group.scores[place])
        group.add(tuple(self.tokens(beam).tolist()), total, self.length, self._trails[beam])
        group.scores[place] = -np.inf

    def _place(self, beam: int) -> tuple[_Group, int]:
        return self._groups[beam // self._size], beam % self._size

    @property
    def num_certain(self) -> int:
        """Return the number of certain texts, as ``BeamSearch.num_certain``, over the hypotheses of all groups and
        those that unfinished groups may still find. Among hypotheses of equal score the later comes first."""
        if not self.length:
            return 0
        maximum = max(group.bound(self.length) for group in self._groups)
        return sum(one.score > maximum for group in self._groups for one in group.hypotheses)

    def step(
        self,
        log_probs: Any,
        note: Note | None = None,
        ending: Ending | None = None,
        process: Process | None = None,
    ) -> Sequence[Fork]:
        """Take a step as ``BeamSearch.step`` does; return the beams that go on, group by group. The beams of a finished
        group go on with the filler and do not count."""
        chosen: list[int] = []
        forks: list[Fork] = []
        trails: list[Trail | None] = []
        for number, group in enumerate(self._groups):
            first = number * self._size
            mine, trail = [Fork(first, self._filler)] * self._size, [self._trails[first]] * self._size
            if not group.done:
                beams = range(first, first + self._size) if self.length else range(1)
                rows = self._processed(log_probs[beams.start : beams.stop], beams, chosen, process)
                mine, trail = self._choose(group, first, rows.expand(self._size, -1), note, ending)
            forks += mine
            trails += trail
            chosen += [fork.token_id for fork in mine]
        if not self.length:  # all beams are the prompt
            forks = [Fork(0, fork.token_id) for fork in forks]
        before = self._running[[fork.parent for fork in forks]]
        self._running = np.concatenate((before, np.array(chosen, dtype=np.int32)[:, None]), axis=1)
        self._trails = trails
        self.done = all(group.done for group in self._groups) or self.length >= self._max_tokens
        if self.done:
            self._finish()
        return () if self.done else forks

    def _processed(self, log_probs: Any, beams: range, chosen: list[int], process: Process | None) -> Any:
        """Return a group's log probabilities less the penalty for the tokens ``chosen`` by earlier groups, then
        processed."""
        if chosen:
            counts = torch.bincount(torch.tensor(chosen), minlength=log_probs.shape[-1]).to(log_probs.device)
            log_probs = log_probs - float(self._diversity) * counts
        if process is not None:
            log_probs = log_probs if chosen else log_probs.clone()
            process(beams, log_probs)
        return log_probs

    def _choose(
        self, group: _Group, first: int, log_probs: Any, note: Note | None, ending: Ending | None
    ) -> tuple[list[Fork], list[Trail | None]]:
        """Choose what one group goes on with, and keep its texts that end."""
        sums = (log_probs + torch.from_numpy(group.scores).to(log_probs.device)[:, None]).reshape(-1)
        found = torch.topk(sums, min(max(2, 1 + len(self._ends)) * self._size, len(sums)))
        length, size = self.length + 1, log_probs.shape[-1]
        candidates = [Fork(first + place // size, place % size) for place in found.indices.tolist()]
        trails: list[Trail | None] = [None] * len(candidates)
        if note is not None:
            trails = [Trail(self._trails[c.parent], n) for c, n in zip(candidates, note(candidates), strict=True)]
        ended = [False] * len(candidates) if ending is None else ending(candidates)
        going: list[int] = []
        values = found.values.tolist()
        for rank, candidate in enumerate(candidates):
            if values[rank] == -np.inf:
                break
            if ended[rank] or candidate.token_id in self._ends:
                if rank < self._size:
                    text = (*self.tokens(candidate.parent).tolist(), candidate.token_id)
                    group.add(text, values[rank], length, trails[rank])
                continue
            going.append(rank)
            if len(going) == self._size:
                break
        missing = self._size - len(going)
        group.scores = np.array([*(values[rank] for rank in going), *[-np.inf] * missing], dtype=np.float32)
        group.judge(values[0], length)
        group.done = group.done or not going
        mine = [candidates[rank] for rank in going] + [Fork(first, self._filler)] * missing
        return mine, [trails[rank] for rank in going] + [self._trails[first]] * missing

    def _finish(self) -> None:
        """Make the beams that are cut at the full length hypotheses too."""
        for number, group in enumerate(self._groups):
            for i in () if group.done else range(self._size):
                beam = number * self._size + i
                if not self.is_alive(beam):
                    continue
                group.add(tuple(self.tokens(beam).tolist()), float(group.scores[i]), self.length, self._trails[beam])

    def best(self, count: int) -> list[Hypothesis]:
        """Return the best ``count`` hypotheses of all groups, as ``BeamSearch.best``."""
        found = [one for group in self._groups for one in group.hypotheses]
        ranked = sorted(found, key=lambda one: one.score)[::-1]
        if not self.done and self.length:
            for beam in filter(self.is_alive, range(self.width)):
                ranked.append(Hypothesis(tuple(self.tokens(beam).tolist()), 0.0, Trail.notes(self._trails[beam])))
        return ranked[: min(count, self.width)]
