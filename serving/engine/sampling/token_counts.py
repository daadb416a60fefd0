"""How often each token came in each sequence with penalties, on the device.

A step that is launched before the last one's tokens are read needs them counted. So each draw counts its own tokens, as
words [slots, V] that a kernel reads beside the logits::

    word   2 x (times that presence and frequency penalties count) + (1 if it is in the prompt)

Any word but 0 is a token that the repetition penalty applies to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..devices.transfers import constant, upload
from ..scheduling.sequence import SamplePosition, SequenceState

FIRST_SLOTS = 8


@dataclass(slots=True)
class _Slot:
    """A row of words, which counts the first ``counted`` tokens of ``sequence``."""

    sequence: SequenceState
    row: int
    counted: int = 0


class TokenCounts:
    """The counts of the sequences that were last seen in ``slots_of``, by their ids, on one device."""

    def __init__(self) -> None:
        self.words: Any = None
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []

    def slots_of(self, sequences: Sequence[SequenceState], lengths: Sequence[int], like: Any) -> list[int]:
        """Return the row of ``words`` of each sequence; it counts its first ``lengths[i]`` tokens. What is not counted
        yet must be known on the host. ``like`` [B, V] are logits."""
        if self.words is None or self.words.shape[1] != like.shape[-1]:
            self.clear()
            self.words = torch.zeros(FIRST_SLOTS, like.shape[-1], dtype=torch.int32, device=like.device)
            self._free = list(range(FIRST_SLOTS))
        rows, behind = [], []
        for sequence, length in zip(sequences, lengths, strict=True):
            slot = self._slots.get(sequence.id)
            if slot is not None and (slot.counted > length or slot.sequence is not sequence):
                self.forget([sequence.id])
                slot = None
            if slot is None:
                slot = self._take(sequence)
            if slot.counted < length:
                behind.append((slot, length))
            rows.append(slot.row)
        if behind:
            self._catch_up(behind)
        return rows

    def _take(self, sequence: SequenceState) -> _Slot:
        if not self._free:
            gone = [key for key, slot in self._slots.items() if slot.sequence.status != "running"]
            self.forget(gone)
        if not self._free:
            size = len(self.words)
            self.words = torch.cat([self.words, torch.zeros_like(self.words)])
            self._free = list(range(size, 2 * size))
        slot = _Slot(sequence, self._free.pop(0))
        self.words[slot.row].zero_()
        self._slots[sequence.id] = slot
        return slot

    def _catch_up(self, behind: Sequence[tuple[_Slot, int]]) -> None:
        size = self.words.shape[1]
        places, words = [], []
        for slot, length in behind:
            ids, found = words_of(slot.sequence, slot.counted, length, size)
            places.append(ids + slot.row * size)
            words.append(found)
            slot.counted = length
        device = self.words.device
        self._add(upload(np.concatenate(places), device), upload(np.concatenate(words), device))

    def count(self, sequences: Sequence[SequenceState], tokens: Any) -> None:
        """Count one more token of each of ``sequences``; a negative number in ``tokens`` int64 [B] is none."""
        rows = tuple(self._slots[sequence.id].row for sequence in sequences)
        for sequence in sequences:
            self._slots[sequence.id].counted += 1
        first = constant(tuple(row * self.words.shape[1] for row in rows), torch.int64, self.words.device)
        self._add(first + tokens.clamp_min(0), 2 * (tokens >= 0).to(torch.int32))

    def _add(self, places: Any, words: Any) -> None:
        self.words.view(-1).index_add_(0, places, words)

    def forget(self, ids: Iterable[int]) -> None:
        """Count these sequences anew if they come again."""
        for key in ids:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot.row)

    def clear(self) -> None:
        """Forget all sequences."""
        self.forget(list(self._slots))


def words_of(sequence: SamplePosition, start: int, stop: int, vocab_size: int) -> tuple[Any, Any]:
    """Return the tokens at positions ``[start, stop)`` of a sequence without repetition, and what they add to its
    words: int64 and int32 arrays. Ids after the vocabulary are left out."""
    tokens, num_prompt = sequence.tokens, sequence.num_prompt
    ids, words = [], []
    if start < num_prompt:
        assert start == 0, "a prompt is counted whole"
        found, counts = np.unique(tokens[: min(num_prompt, stop)], return_counts=True)
        ids.append(found)
        words.append(2 * counts + 1 if sequence.sampling.penalize_prompt else np.ones_like(counts))
    if stop > num_prompt:
        found, counts = np.unique(tokens[max(start, num_prompt) : stop], return_counts=True)
        ids.append(found)
        words.append(2 * counts)
    known, values = np.concatenate(ids).astype(np.int64), np.concatenate(words).astype(np.int32)
    kept = known < vocab_size
    return known[kept], values[kept]
