"""Beam search over one prompt, as arithmetic: log probabilities in, which beams go on and how the search ends out.

The rules are transformers' (5.x, ``GenerationMixin._beam_search``), to the rounding: scores are sums of log
probabilities in float32; of the best ``keep`` continuations those that end are hypotheses if they are among the best
``width``, and the best ``width`` of the others go on; a hypothesis counts by its sum over its length to the power of
``length_penalty``.

What is forbidden has the log probability -inf. A beam of that score, or one that has ended and keeps its place alone,
is not alive (``is_alive``): nothing comes of it, and a search without a beam that is alive is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..request import EarlyStopping
from .native.continuations import Continuations, best_continuations

NONE = np.float32(-1e9)  # of a place that has no beam or hypothesis
DEAD = NONE / 2  # sums of log probabilities are greater


class Fork(NamedTuple):
    """A beam of the next step: beam ``parent`` of this one, and ``token_id`` after it."""

    parent: int
    token_id: int


Note: TypeAlias = Callable[[list[Fork]], list[Any]]
"""Asked in each step for something to remember of each candidate; what a hypothesis's tokens had comes with it."""

Ending: TypeAlias = Callable[[list[Fork]], list[bool]]
"""Asked in each step which candidates end their texts, beside those whose last token does."""


Process: TypeAlias = Callable[[range, Any], None]
"""Asked in each step to change the log probabilities of some of the beams, [beams, V], in place: what a request adds to
them or forbids. At the first step they are one beam, the prompt."""


class Trail(NamedTuple):
    """What was remembered of a text's tokens, the last one first."""

    before: Trail | None
    note: Any

    @staticmethod
    def notes(trail: Trail | None) -> tuple[Any, ...]:
        """From the first token to the last."""
        found = []
        while trail is not None:
            found.append(trail.note)
            trail = trail.before
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A whole text, its ending token included; ``score`` is its sum of log probabilities over its penalised length.
    ``notes`` are what was remembered of each token, () for nothing."""

    token_ids: tuple[int, ...]
    score: float
    notes: tuple[Any, ...] = ()


class _Finished(NamedTuple):
    """A hypothesis that is kept; the places that are left have no tokens."""

    score: np.float32
    token_ids: tuple[int, ...]
    trail: Trail | None


class RunningBeams:
    """What every search has: ``width`` beams that are equally long, and what was remembered of their tokens."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.done = False
        self._running = np.zeros((width, 0), dtype=np.int32)
        self._trails: list[Trail | None] = [None] * width

    @property
    def length(self) -> int:
        """Tokens that each running beam has."""
        return self._running.shape[1]

    def tokens(self, beam: int) -> npt.NDArray[np.int32]:
        """Token ids of a running beam, int32 [length], a view."""
        return self._running[beam]

    def is_alive(self, beam: int) -> bool:
        """Whether something may come of a running beam."""
        raise NotImplementedError

    def complete(self, beam: int) -> None:
        """The text of a running beam is whole as it is: a hypothesis, and no beam any more."""
        raise NotImplementedError

    @property
    def num_certain(self) -> int:
        """How many hypotheses, from the best one on, no running beam can come before, where log probabilities are no
        greater than 0."""
        raise NotImplementedError


class BeamSearch(RunningBeams):
    """``width`` beams of one prompt, of at most ``max_tokens`` tokens; any of ``ends`` ends a text.

    The search ends before its full length where it has ``width`` hypotheses and, with ``early_stopping`` "heuristic",
    the best running beam is no better at its present length than the worst of them; "first": at once; "never": where no
    longer text could be better (transformers' False, True and "never").

    ``step`` is called with the log probabilities of every running beam until ``done``; ``best`` then has the
    hypotheses, the best one first.
    """

    def __init__(
        self, width: int, max_tokens: int, ends: Collection[int], length_penalty: float, early_stopping: EarlyStopping
    ) -> None:
        super().__init__(width)
        self._max_tokens = max_tokens
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._penalty = length_penalty
        self._early = early_stopping
        self._keep = max(2, 1 + len(self._ends)) * width
        self._scores = np.full(width, NONE, dtype=np.float32)
        self._scores[0] = 0.0  # all beams are the same prompt: only one of them may go on
        self._finished: list[_Finished] = [_Finished(NONE, (), None)] * width
        self._can_improve = True

    def is_alive(self, beam: int) -> bool:
        return bool(self._scores[beam] > DEAD)

    def complete(self, beam: int) -> None:
        score = self._scores[beam] / np.float32(self.length**self._penalty)
        text = _Finished(score, tuple(self.tokens(beam).tolist()), self._trails[beam])
        self._finished = sorted([*self._finished, text], key=lambda one: -one.score)[: self.width]
        self._scores[beam] = -np.inf

    @property
    def num_certain(self) -> int:
        length = self._max_tokens if self._penalty > 0.0 else self.length
        most = self._scores.max() / np.float32(length**self._penalty)
        return sum(bool(one.token_ids) and bool(one.score >= most) for one in self._finished)

    def step(
        self,
        log_probs: Any,
        note: Note | None = None,
        ending: Ending | None = None,
        process: Process | None = None,
    ) -> Sequence[Fork]:
        """The beams that go on, best first; none when the search is ``done``.

        ``log_probs`` is a float32 tensor [width, V]: after the first token of each beam; at the first step of the
        prompt alone, [1, V] or any number of equal rows. With ``process`` they change.
        """
        if process is not None:
            process(range(len(log_probs)), log_probs)
        scores = torch.from_numpy(self._scores[: len(log_probs)]).to(log_probs.device)
        sums = (log_probs + scores[:, None]).reshape(-1)
        found = torch.topk(sums, min(self._keep, len(sums)))
        continuations = Continuations(found.values.cpu().numpy(), found.indices.cpu().numpy(), log_probs.shape[-1])
        return self._choose(continuations, note, ending)

    def step_native(self, logits: Sequence[Any], ending: Ending | None = None) -> Sequence[Fork]:
        """``step`` by our own kernels, of rows of logits [V] that ``can_continue``. Raises ``FloatingPointError`` where
        they are not finite."""
        return self._choose(best_continuations(logits, self._scores, self._keep), None, ending)

    def _choose(self, found: Continuations, note: Note | None, ending: Ending | None) -> Sequence[Fork]:
        """Of the best continuations, best first, those that go on."""
        values, parents, token_ids = found.sums, found.places // found.size, found.places % found.size
        ended = np.isin(token_ids, self._ends) | (self.length + 1 >= self._max_tokens)
        extended = np.concatenate((self._running[parents], token_ids[:, None].astype(np.int32)), axis=1)
        candidates = [Fork(int(p), int(t)) for p, t in zip(parents, token_ids, strict=True)]
        if ending is not None:
            ended |= np.array(ending(candidates))
        trails: list[Trail | None] = [None] * len(candidates)
        if note is not None:
            trails = [Trail(self._trails[c.parent], n) for c, n in zip(candidates, note(candidates), strict=True)]
        self._collect(values, extended, trails, ended)
        # stable: of equal scores the better candidate goes first, as it came
        order = np.argsort(-(values + ended.astype(np.float32) * NONE), kind="stable")[: self.width]
        self._running = extended[order]
        self._trails = [trails[i] for i in order]
        self._scores = (values + ended.astype(np.float32) * NONE)[order]
        self._judge(bool((ended | (values == -np.inf)).all()))
        return () if self.done else [candidates[i] for i in order]

    def _collect(
        self, values: npt.NDArray[np.float32], texts: Any, trails: list[Trail | None], ended: npt.NDArray[np.bool_]
    ) -> None:
        """Keep the best hypotheses of those before and of ``texts`` that ended among the best ``width``."""
        scores = values / np.float32(texts.shape[1] ** self._penalty)
        if (self._early == "first" and self._is_full) or not self._can_improve:
            scores = scores + NONE
        found = [
            _Finished(scores[i], tuple(texts[i].tolist()), trails[i])
            for i in range(min(self.width, len(values)))
            if ended[i]
        ]
        # stable: of equal scores the one that was there before stays
        self._finished = sorted(self._finished + found, key=lambda one: -one.score)[: self.width]

    @property
    def _is_full(self) -> bool:
        return all(one.token_ids for one in self._finished)

    def _judge(self, all_ended: bool) -> None:
        """Whether the search goes on: no hypothesis can improve, enough are there, or no beam can go on."""
        longest = self._early == "never" and self._penalty > 0.0
        best = self._scores[0] / np.float32((self._max_tokens if longest else self.length) ** self._penalty)
        worst = self._finished[-1].score if self._is_full else NONE
        self._can_improve = self._can_improve and bool(best > worst)
        self.done = not self._can_improve or (self._early == "first" and self._is_full) or all_ended

    def best(self, count: int) -> list[Hypothesis]:
        """The best ``count`` hypotheses, at most ``width``; where the search is not ``done`` running beams, as far as
        they are, after those that there are."""
        found = [
            Hypothesis(one.token_ids, float(one.score), Trail.notes(one.trail))
            for one in self._finished
            if one.token_ids
        ]
        for beam in range(self.width) if self.length else ():
            if not self.is_alive(beam):
                continue
            score = float(self._scores[beam]) / self.length**self._penalty
            found.append(Hypothesis(tuple(self.tokens(beam).tolist()), score, Trail.notes(self._trails[beam])))
        return found[: min(count, self.width)]
