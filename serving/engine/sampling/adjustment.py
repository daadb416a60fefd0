"""``sampler.adjust`` on a device, without waiting for it and before the last token is known on the host.

::

    logits ──► embedding bias ──► penalties by ``TokenCounts`` ──► edits ──► float32 [B, V]

An edit adds a number to one logit: a bias, or minus infinity for a token that may not come. Edits that do not depend on
the text are uploaded once for a batch. Those that do (bad words, repeated n-grams) are found for the text without its
last token, each with the last token that it is for, which the device compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..constraints.logits_processors import ANY
from ..devices.transfers import constant, upload
from ..scheduling.sequence import SequenceState
from . import device_sampling
from .sampler import forbids_stops, has_penalties
from .token_counts import TokenCounts

BLOCK_TOKENS = 2048
FORBIDDEN = float("-inf")


class Adjuster:
    """The adjustment of one engine's logits, with what it keeps of its sequences on the device."""

    def __init__(self) -> None:
        self.counts = TokenCounts()
        self._fixed_key: tuple[Any, ...] = ()
        self._fixed: Any = None

    def adjust(self, logits: Any, sequences: Sequence[SequenceState], positions: Sequence[int], last: Any) -> Any:
        """Return adjusted ``logits`` [B, V] as float32, in memory of their own.

        ``positions`` are those of the tokens to be drawn; ``last`` int64 [B] are the tokens before them, on the device,
        which the host need not know."""
        adjusted = self._penalized(self._biased(logits, sequences), sequences, positions)
        fixed = self._fixed_edits(sequences, positions, adjusted)
        flat = adjusted.view(-1)
        if fixed is not None:
            flat.index_add_(0, *fixed)
        edits = _text_edits(sequences, positions)
        if edits is not None:
            flat.index_add_(0, *_compared(edits, last, adjusted))
        return adjusted

    def _biased(self, logits: Any, sequences: Sequence[SequenceState]) -> Any:
        biases = {
            i: s.processors
            for i, s in enumerate(sequences)
            if s.processors is not None and s.processors.bias is not None
        }
        if not biases:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for i, processors in biases.items():
            logits[i] += processors.bias_on(logits.device)
        return logits

    def _penalized(self, logits: Any, sequences: Sequence[SequenceState], positions: Sequence[int]) -> Any:
        penalized = [i for i, sequence in enumerate(sequences) if has_penalties(sequence)]
        if not penalized:
            return logits.to(torch.float32, copy=True)
        own = self.counts.slots_of([sequences[i] for i in penalized], [positions[i] for i in penalized], logits)
        slots = [-1] * len(sequences)
        for i, slot in zip(penalized, own, strict=True):
            slots[i] = slot
        penalties = tuple(
            (s.sampling.repetition_penalty, s.sampling.presence_penalty, s.sampling.frequency_penalty)
            for s in sequences
        )
        device = logits.device
        return penalize(
            logits,
            self.counts.words,
            constant(tuple(slots), torch.int64, device),
            constant(penalties, torch.float32, device),
        )

    def count(self, sequences: Sequence[SequenceState], tokens: Any) -> None:
        """Count the tokens drawn for ``sequences``, which were adjusted; int64 [B], negative if there is none."""
        rows = [i for i, sequence in enumerate(sequences) if has_penalties(sequence)]
        if rows:
            own = (
                tokens
                if len(rows) == len(sequences)
                else tokens.index_select(0, constant(tuple(rows), torch.int64, tokens.device))
            )
            self.counts.count([sequences[i] for i in rows], own)

    def forget(self, ids: Iterable[int]) -> None:
        """Forget what was kept of these sequences: tokens that were counted are not theirs."""
        self.counts.forget(ids)

    def clear(self) -> None:
        """Forget all sequences."""
        self.counts.clear()

    def _fixed_edits(self, sequences: Sequence[SequenceState], positions: Sequence[int], like: Any) -> Any:
        """Return places in the flat logits and what to add there, which do not depend on texts; None if there are
        none."""
        held = [_stops_to_forbid(s, position) for s, position in zip(sequences, positions, strict=True)]
        key = (*(sequence.id for sequence in sequences), *held)
        if key != self._fixed_key:
            size = like.shape[-1]
            places, values = [], []
            for i, (sequence, stops) in enumerate(zip(sequences, held, strict=True)):
                for tokens, value in _fixed_edits(sequence, stops):
                    inside = (tokens >= 0) & (tokens < size)
                    places.append(tokens[inside] + i * size)
                    values.append(value[inside])
            self._fixed_key, self._fixed = key, None
            if sum(map(len, places)):
                self._fixed = (upload(np.concatenate(places), like.device), upload(np.concatenate(values), like.device))
        return self._fixed


def penalize(logits: Any, words: Any, slots: Any, penalties: Any) -> Any:
    """Return ``logits`` [B, V] as float32 after ``penalties`` float32 [B, 3] (repetition, presence, frequency) by the
    rows ``slots`` int64 [B] of ``words``; rows with a negative slot as they are."""
    rows, size = logits.shape
    if device_sampling.is_offered(logits.device):
        from . import adjustment_kernel

        out = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
        assert logits.stride(1) == 1
        grid = rows, -(-size // BLOCK_TOKENS)
        adjustment_kernel.penalize[grid](
            logits, words, slots, penalties, out, logits.stride(0), size, BLOCK=BLOCK_TOKENS, num_warps=8
        )
        return out
    return penalize_by_torch(logits, words, slots, penalties)


def penalize_by_torch(logits: Any, words: Any, slots: Any, penalties: Any) -> Any:
    """Do what ``penalize`` does by torch's operations."""
    values = logits.to(torch.float32)
    word = words.index_select(0, slots.clamp_min(0)).masked_fill_(slots[:, None] < 0, 0)
    repetition, presence, frequency = penalties.unbind(1)
    repeated = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    values = torch.where(word != 0, repeated, values)
    counts = word >> 1
    return torch.where(counts > 0, values - (presence[:, None] + frequency[:, None] * counts), values)


def _stops_to_forbid(sequence: SequenceState, position: int) -> tuple[int, ...]:
    """Return the stop tokens that may not come at ``position``."""
    if not forbids_stops(sequence, position):
        return ()
    stops = sequence.sampling.stop_token_ids
    return stops if sequence.grammar_state is None else tuple(sequence.grammar_state.stops_to_forbid(stops))


def _fixed_edits(sequence: SequenceState, stops: Sequence[int]) -> Iterable[tuple[Any, Any]]:
    p, processors = sequence.sampling, sequence.processors
    if p.logit_bias:
        tokens, values = zip(*p.logit_bias, strict=True)
        yield np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32)
    banned = [] if processors is None or processors.depends_on_text else [processors.forbidden(sequence.tokens[:0])]
    banned += [np.array(stops, dtype=np.int64)] if stops else []
    for forbidden in banned:
        yield forbidden, np.full(len(forbidden), FORBIDDEN, dtype=np.float32)


def _text_edits(sequences: Sequence[SequenceState], positions: Sequence[int]) -> Any:
    """Return edits that depend on texts, int64 [3, edits]: row, previous token, token that may not follow it; None if
    there are none."""
    rows, found = [], []
    for i, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        if sequence.processors is not None and sequence.processors.depends_on_text:
            rows.append(i)
            found.append(sequence.processors.forbidden_pairs(sequence.tokens[: position - 1]))
    if not any(len(then) for _, then in found):
        return None
    previous, then = zip(*found, strict=True)
    return np.stack([np.repeat(rows, [len(one) for one in then]), np.concatenate(previous), np.concatenate(then)])


def _compared(edits: Any, last: Any, like: Any) -> tuple[Any, Any]:
    """Return places and what to add there: minus infinity where the last token is the one that an edit is for."""
    row, previous, then = upload(edits, like.device).unbind(0)
    own, size = last.index_select(0, row), like.shape[-1]
    then = torch.where(then == ANY, own, then)
    applies = ((previous == ANY) | (previous == own)) & (then < size)  # a prompt may have ids after the vocabulary
    values = torch.where(applies, FORBIDDEN, 0.0)
    return row * size + then.clamp(0, size - 1), values.to(torch.float32)
