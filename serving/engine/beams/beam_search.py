"""The arithmetic of beam search over one prompt: it takes log probabilities and decides which beams go on.

The rules are those of transformers (5.x, ``GenerationMixin._beam_search``), down to the rounding:

- Scores are sums of log probabilities in float32.
- Of the best ``keep`` continuations, those that end become hypotheses if they are among the best ``width``. The best
  ``width`` of the others go on.
- A hypothesis is ranked by its sum divided by its length to the power of ``length_penalty``.

A forbidden token has the log probability -inf. A beam with that score, or one that has ended and only keeps its place,
is not alive (``is_alive``): it cannot produce a text. A search without a living beam is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...interface.request import EarlyStopping
from ..native.continuations import Continuations, best_continuations

NONE = np.float32(-1e9)  # the score of a place that has no beam or hypothesis
DEAD = NONE / 2  # every sum of log probabilities is greater


class Fork(NamedTuple):
    """A beam of the next step: beam ``parent`` of this one, and ``token_id`` after it."""

    parent: int
    token_id: int


Note: TypeAlias = Callable[[list[Fork]], list[Any]]
"""Called in each step to make a note for each candidate; a hypothesis comes with the notes of its tokens."""

Ending: TypeAlias = Callable[[list[Fork]], list[bool]]
"""Called in each step to tell which candidates end their texts, beside those whose last token does."""


Process: TypeAlias = Callable[[range, Any], None]
"""Called in each step to change the log probabilities [beams, V] of some beams in place, by the biases, penalties and
bans of a request. At the first step there is one beam, the prompt."""


class Trail(NamedTuple):
    """The notes of a text's tokens, the last one first."""

    before: Trail | None
    note: Any

    @staticmethod
    def notes(trail: Trail | None) -> tuple[Any, ...]:
        """Return the notes from the first token to the last."""
        found = []
        while trail is not None:
            found.append(trail.note)
            trail = trail.before
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete text, its ending token included. ``score`` is its sum of log probabilities over its penalised length;
    ``notes`` has one entry for each token, or is () if nothing was noted."""

    token_ids: tuple[int, ...]
    score: float
    notes: tuple[Any, ...] = ()


class _Finished(NamedTuple):
    """A hypothesis that is kept. A place without one has no tokens."""

    score: np.float32
    token_ids: tuple[int, ...]
    trail: Trail | None


class RunningBeams:
    """The state that every search has: ``width`` beams of equal length, and the notes of their tokens."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.done = False
        self._running = np.zeros((width, 0), dtype=np.int32)
        self._trails: list[Trail | None] = [None] * width

    @property
    def length(self) -> int:
        """How many tokens each running beam has."""
        return self._running.shape[1]

    def tokens(self, beam: int) -> npt.NDArray[np.int32]:
        """Return the token ids of a running beam, int32 [length], a view."""
        return self._running[beam]

    def is_alive(self, beam: int) -> bool:
        """Return whether a running beam may still produce a text."""
        raise NotImplementedError

    def complete(self, beam: int) -> None:
        """Make the text of a running beam, which is complete as it is, a hypothesis and end the beam."""
        raise NotImplementedError

    @property
    def num_certain(self) -> int:
        """How many hypotheses, counted from the best, no running beam can overtake, provided that log probabilities
        are at most 0."""
        raise NotImplementedError


class BeamSearch(RunningBeams):
    """A search with ``width`` beams of one prompt, of at most ``max_tokens`` tokens; any token of ``ends`` ends a text.

    Once it has ``width`` hypotheses, the search may end before its full length, by ``early_stopping``:

    - "heuristic": if the best running beam, at its present length, is no better than the worst hypothesis;
    - "first": at once;
    - "never": if no longer text could be better.

    (These are transformers' False, True and "never".) Call ``step`` with the log probabilities of every running beam
    until ``done``; ``best`` then returns the hypotheses, best first.
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
        self._scores[0] = 0.0  # all beams are the same prompt, so only one of them may go on
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
        maximum = self._scores.max() / np.float32(length**self._penalty)
        return sum(bool(one.token_ids) and bool(one.score >= maximum) for one in self._finished)

    def step(
        self,
        log_probs: Any,
        note: Note | None = None,
        ending: Ending | None = None,
        process: Process | None = None,
    ) -> Sequence[Fork]:
        """Take a step; return the beams that go on, best first, or none if the search is ``done``.

        ``log_probs`` is a float32 tensor [width, V] with a row for each beam. At the first step it is that of the
        prompt alone: [1, V], or any number of equal rows. ``process`` changes it in place.
        """
        if process is not None:
            process(range(len(log_probs)), log_probs)
        scores = torch.from_numpy(self._scores[: len(log_probs)]).to(log_probs.device)
        sums = (log_probs + scores[:, None]).reshape(-1)
        found = torch.topk(sums, min(self._keep, len(sums)))
        continuations = Continuations(found.values.cpu().numpy(), found.indices.cpu().numpy(), log_probs.shape[-1])
        return self._choose(continuations, note, ending)

    def step_native(self, logits: Sequence[Any], ending: Ending | None = None) -> Sequence[Fork]:
        """Take a ``step`` by our own kernels, from rows of logits [V] that ``can_continue``. Raises
        ``FloatingPointError`` if they are not finite."""
        return self._choose(best_continuations(logits, self._scores, self._keep), None, ending)

    def _choose(self, found: Continuations, note: Note | None, ending: Ending | None) -> Sequence[Fork]:
        """Choose the beams that go on, best first, from the best continuations."""
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
        # stable: among equal scores the candidates keep their order, which is best first
        order = np.argsort(-(values + ended.astype(np.float32) * NONE), kind="stable")[: self.width]
        self._running = extended[order]
        self._trails = [trails[i] for i in order]
        self._scores = (values + ended.astype(np.float32) * NONE)[order]
        self._judge(bool((ended | (values == -np.inf)).all()))
        return () if self.done else [candidates[i] for i in order]

    def _collect(
        self, values: npt.NDArray[np.float32], texts: Any, trails: list[Trail | None], ended: npt.NDArray[np.bool_]
    ) -> None:
        """Keep the best of the earlier hypotheses and of the ``texts`` that ended among the best ``width``."""
        scores = values / np.float32(texts.shape[1] ** self._penalty)
        if (self._early == "first" and self._is_full) or not self._can_improve:
            scores = scores + NONE
        found = [
            _Finished(scores[i], tuple(texts[i].tolist()), trails[i])
            for i in range(min(self.width, len(values)))
            if ended[i]
        ]
        # stable: among equal scores the earlier hypothesis stays
        self._finished = sorted(self._finished + found, key=lambda one: -one.score)[: self.width]

    @property
    def _is_full(self) -> bool:
        return all(one.token_ids for one in self._finished)

    def _judge(self, all_ended: bool) -> None:
        """Decide whether the search is done: no hypothesis can improve, there are enough, or no beam can go on."""
        longest = self._early == "never" and self._penalty > 0.0
        best = self._scores[0] / np.float32((self._max_tokens if longest else self.length) ** self._penalty)
        worst = self._finished[-1].score if self._is_full else NONE
        self._can_improve = self._can_improve and bool(best > worst)
        self.done = not self._can_improve or (self._early == "first" and self._is_full) or all_ended

    def best(self, count: int) -> list[Hypothesis]:
        """Return the best ``count`` hypotheses, at most ``width``. If the search is not ``done``, running beams with
        the tokens they have follow the hypotheses."""
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
