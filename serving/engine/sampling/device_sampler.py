"""Draws the tokens of a step, and what else is asked about them, on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from ..devices.transfers import constant, upload
from ..scheduling.sequence import NO_ALLOWED_TOKEN, Sampled, SamplePosition, SequenceState
from .adjustment import Adjuster
from .greedy import greedy_tokens
from .sampler import (
    NEEDS_FULL_SORT,
    draw_unread,
    forbids_stops,
    has_logit_changes,
    kinds_unread,
    listed,
    restrict,
    sample,
    score,
)


@dataclass(frozen=True, slots=True)
class Scores:
    """The log probabilities of tokens in ``rows`` of a step: of the token itself, ``own`` [rows], and of the best ones
    with their ids, ``values`` and ``ids`` [rows, the largest of counts]; a row lists ``counts[i]`` of them."""

    rows: Sequence[int]
    counts: Sequence[int]
    own: Any
    values: Any
    ids: Any


@dataclass(frozen=True, slots=True)
class Drawn:
    """The ``tokens`` int64 [B] of a step, as ``draw_unread`` returns them, and the log probabilities asked for.
    ``may_be_undecided``: some may be ``NEEDS_FULL_SORT``."""

    tokens: Any
    scores: Scores | None = None
    may_be_undecided: bool = False

    def copied(self) -> Drawn:
        """Return a copy on the host, which is complete once the device has done what it was given before."""
        scores = self.scores
        if scores is not None:
            parts = (_copied(part) for part in (scores.own, scores.values, scores.ids))
            scores = Scores(scores.rows, scores.counts, *parts)
        return Drawn(_copied(self.tokens), scores)

    def on_host(self) -> Drawn:
        """Return a copy on the host, waiting for the device."""
        if self.tokens.device.type != "cuda":
            return self
        copy = self.copied()
        torch.cuda.current_stream(self.tokens.device).synchronize()
        return copy

    def sampled(self) -> list[Sampled]:
        """Return what a complete copy on the host contains."""
        tokens: list[int] = self.tokens.tolist()
        result = [Sampled(token) for token in tokens]
        if self.scores is not None:
            rows = self.scores.rows
            found = listed(
                [tokens[i] for i in rows], self.scores.own, self.scores.values, self.scores.ids, self.scores.counts
            )
            for i, one in zip(rows, found, strict=True):
                if tokens[i] >= 0:
                    result[i] = Sampled(tokens[i], one)
        return result


def is_remote(logits: Any) -> bool:
    """Return whether reading ``logits`` is waiting for a device."""
    return bool(logits.device.type != "cpu")


def _copied(tensor: Any) -> Any:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class Batch(Struct, frozen=True):
    """The wishes of a step's sequences, by their rows, which stay the same as long as the sequences do."""

    ids: list[int]
    kinds: dict[str, list[int]]
    changes: bool  # of logits, wherever the sequences are
    forbidding: list[int]  # rows that may forbid stop tokens
    scored: list[int]

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], ids: list[int], device: Any) -> Batch:
        rows = range(len(sequences))
        parameters = [sequence.sampling for sequence in sequences]
        return cls(
            ids,
            kinds_unread(sequences, device),
            any(map(has_logit_changes, sequences)),
            [i for i in rows if parameters[i].min_tokens > 0],
            [i for i in rows if parameters[i].logprobs is not None],
        )


class DeviceSampler:
    """The sampler of one engine's sequences, whose last tokens the host may not know yet."""

    def __init__(self) -> None:
        self._adjuster = Adjuster()
        self._batch: Batch | None = None

    def sample(self, logits: Any, places: Sequence[SamplePosition]) -> list[Sampled]:
        """Do what ``sampler.sample`` does, waiting for a device once."""
        if not is_remote(logits):
            return sample(logits, places)
        sequences = [place for place in places if isinstance(place, SequenceState) and place.sampling.draft is None]
        if len(sequences) < len(places):
            return sample(logits, places)
        last = upload(np.array([sequence.tokens[-1] for sequence in sequences], dtype=np.int64), logits.device)
        positions = [sequence.num_tokens for sequence in sequences]
        found = self.draw(logits, sequences, positions, last, counts=False).on_host().sampled()
        undecided = [i for i, one in enumerate(found) if one.token_id == NEEDS_FULL_SORT]
        if undecided:
            chosen = sample(logits[undecided], [sequences[i] for i in undecided])
            for i, one in zip(undecided, chosen, strict=True):
                found[i] = one
        return found

    def draw(
        self,
        logits: Any,
        sequences: Sequence[SequenceState],
        positions: Sequence[int],
        last: Any,
        largest_tokens: Any = None,
        *,
        counts: bool = True,
    ) -> Drawn:
        """Return the tokens of ``logits`` [B, V] at ``positions``, after the tokens ``last`` int64 [B], negative where
        there is none. ``largest_tokens`` are ``greedy_tokens(logits)`` if that is known.

        With ``counts`` they are counted as the sequences' next tokens; otherwise the host does that, as it may with
        sequences that do not satisfy ``is_drawn_unread``."""
        batch = self._batch_of(sequences, logits.device)
        adjusted = batch.changes or any(forbids_stops(sequences[i], positions[i]) for i in batch.forbidding)
        undecided = "truncated" in batch.kinds
        if largest_tokens is None:
            largest_tokens = greedy_tokens(logits)
        if not adjusted and all(sequence.grammar_state is None for sequence in sequences):
            tokens = draw_unread(logits, sequences, positions, largest_tokens, batch.kinds)
            return Drawn(tokens, _scores(logits, sequences, tokens, batch.scored), undecided)
        if adjusted:
            changed = self._adjuster.adjust(logits, sequences, positions, last)
        else:
            changed = logits.to(torch.float32, copy=True)
        restrict(changed, sequences)
        largest_changed = greedy_tokens(changed)
        tokens = draw_unread(changed, sequences, positions, largest_changed, batch.kinds)
        may_die = tuple(sequence.processors is not None for sequence in sequences)
        if any(may_die):  # what was finite has no largest any more
            dead = (largest_changed < 0) & constant(may_die, torch.bool, logits.device)
            tokens = torch.where(dead, NO_ALLOWED_TOKEN, tokens)
        tokens = torch.where(largest_tokens < 0, -1, tokens)
        if adjusted and counts:
            self._adjuster.count(sequences, tokens)
        return Drawn(tokens, _scores(logits, sequences, tokens, batch.scored), undecided)

    def _batch_of(self, sequences: Sequence[SequenceState], device: Any) -> Batch:
        """Return what ``sequences`` ask for: what was found a step ago, if they are the same."""
        ids = [sequence.id for sequence in sequences]
        if self._batch is None or self._batch.ids != ids:
            self._batch = Batch.of(sequences, ids, device)
        return self._batch

    def forget(self, sequences: Iterable[SequenceState]) -> None:
        """Forget what was kept of ``sequences``: tokens were drawn that are not theirs."""
        self._adjuster.forget(sequence.id for sequence in sequences)

    def clear(self) -> None:
        """Forget what was kept of all sequences."""
        self._adjuster.clear()


def _scores(logits: Any, sequences: Sequence[SequenceState], tokens: Any, rows: Sequence[int]) -> Scores | None:
    """Return the log probabilities that ``rows`` ask for."""
    if not rows:
        return None
    counts = [sequences[i].sampling.logprobs or 0 for i in rows]
    if len(rows) < len(sequences):
        at = constant(tuple(rows), torch.int64, logits.device)
        logits, tokens = logits.index_select(0, at), tokens.index_select(0, at)
    return Scores(rows, counts, *score(logits, tokens.clamp_min(0), max(counts)))
