"""A draft model: a small model that proposes what the large one may say next, for texts that repeat nothing.

It samples like the large model, with the request's own parameters and the same random numbers (seed, position). Since
both run the race with the same times, similar models name the same winner at any temperature. It has its own KV cache
for the sequences that it drafts for. Rejected drafts are overwritten there.

::

    known to both   [ … the quick brown fox ]
    its own steps                            jumps ► over ► the          each one forward for all sequences at once
    the large one's                        [ jumps   over   the ] ?      one forward
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.kv_cache import KVCache, PrefixKey, Row, TokenIds
from ..models.step_input import StepInput
from ..sampling.sampler import choose
from ..scheduling.sequence import SequenceState
from ..scheduling.speculation import DraftedPosition, GuessedPosition
from .runner import StepForward

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """The draft model's state of a sequence: the KV of ``length`` tokens, the last of which are ``drafts``."""

    sequence: SequenceState
    length: int
    drafts: TokenIds

    def keep_true(self) -> None:
        """Keep only the drafts that became part of the sequence."""
        start = self.length - len(self.drafts)
        came = self.sequence.tokens[start : self.length]
        differs = np.flatnonzero(self.drafts[: len(came)] != came)
        self.length = start + (int(differs[0]) if len(differs) else len(came))
        self.drafts = self.drafts[:0]


class DraftModel:
    """A model that proposes drafts. Only the engine's thread may use it.

    ``vocab_size`` and ``max_model_len`` are the draft model's own; ``width`` is the number of the large model's logits.
    ``cost`` is the cost of a step relative to the large model's, ``max_tokens`` the maximum number of tokens in a
    step."""

    def __init__(
        self,
        forward: StepForward,
        cache: KVCache,
        *,
        vocab_size: int,
        max_model_len: int,
        width: int,
        cost: float,
        max_tokens: int,
    ) -> None:
        self.cost = cost
        self.forward, self.cache = forward, cache
        self._vocab_size, self._max_model_len, self._width = vocab_size, max_model_len, width
        self._max_tokens = max_tokens
        self._known: dict[int, _Known] = {}
        self.is_broken = False

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[TokenIds]:
        """Propose, for each sequence, at most the given number of tokens (int32) that may come next.

        There are none until the model has read the sequence's prompt; each call reads a part of it."""
        if not wanted or self.is_broken:
            return [sequence.tokens[:0] for sequence, _ in wanted]
        try:
            self._look_back()
            return self._propose(wanted)
        except Exception:  # drafts are no part of any text, so the large model can go on without them
            logger.exception("the draft model failed and is no longer used")
            self.is_broken = True
            return [sequence.tokens[:0] for sequence, _ in wanted]

    def _propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[TokenIds]:
        room = {s.id: min(count, self._max_model_len - s.num_tokens) for s, count in wanted}
        ready = self._read([s for s, _ in wanted if room[s.id] > 0 and self._has_room(s, room[s.id])])
        found: dict[int, list[int]] = {known.sequence.id: [] for known, _ in ready}
        while ready:
            places = [GuessedPosition(known.sequence, len(found[known.sequence.id])) for known, _ in ready]
            tokens = choose(self._widened(torch.stack([logits for _, logits in ready])), places)
            going = [
                known
                for (known, _), place, token in zip(ready, places, tokens, strict=True)
                if self._takes(known, place, token, found[known.sequence.id], room[known.sequence.id])
            ]
            ready = self._step(going, found)
        return [np.array(found.get(sequence.id, ()), dtype=np.int32) for sequence, _ in wanted]

    def _takes(self, known: _Known, place: DraftedPosition, token: int, drafts: list[int], room: int) -> bool:
        """Note a drafted token; return whether another is to follow it."""
        if not 0 <= token < self._vocab_size:
            return False
        drafts.append(token)
        known.sequence.draft(np.array(drafts, dtype=np.int32))  # the next place looks for them there
        return len(drafts) < room and not place.stop_rule.is_stop(token, place.num_generated + 1)

    def _step(self, going: Sequence[_Known], found: dict[int, list[int]]) -> list[tuple[_Known, torch.Tensor]]:
        """Run the last draft of each sequence; return the logits after it."""
        if not going:
            return []
        rows = [Row(known.sequence.id, known.length, 1) for known in going]
        logits = self._run(going, rows)
        for known in going:
            known.length += 1
            known.drafts = np.array(found[known.sequence.id], dtype=np.int32)
            self.cache.computed(known.sequence.id, known.sequence.slice(0, known.length), known.length)
        return list(zip(going, logits, strict=True))

    def _read(self, sequences: Sequence[SequenceState]) -> list[tuple[_Known, torch.Tensor]]:
        """Read the new tokens of ``sequences``, as many as fit into a step. Return the sequences that are fully read,
        with the logits after their last tokens."""
        left = self._max_tokens
        going, rows = [], []
        for sequence in sequences:
            known = self._known[sequence.id]
            count = min(left, sequence.num_tokens - known.length)
            new = sequence.slice(known.length, known.length + count)
            if count < 1 or int(new.max()) >= self._vocab_size:
                continue
            left -= count
            going.append(known)
            rows.append(Row(sequence.id, known.length, count))
        if not going:
            return []
        logits = self._run(going, rows)
        for known, row in zip(going, rows, strict=True):
            known.length += row.num_tokens
            self.cache.computed(row.owner, known.sequence.tokens, known.length)
        read = zip(going, logits, strict=True)
        return [(known, one) for known, one in read if known.length == known.sequence.num_tokens]

    def _run(self, going: Sequence[_Known], rows: Sequence[Row]) -> torch.Tensor:
        """Return the logits after each of ``rows``, in their order."""
        order = list(range(len(rows)))
        if self.forward.wants_decodes_together:
            single = self.cache.decode_order([row.owner for row in rows if row.num_tokens == 1])
            order.sort(key=lambda i: single.index(rows[i].owner) if rows[i].num_tokens == 1 else len(single))
        laid_out = [rows[i] for i in order]
        parts = [going[i].sequence.slice(rows[i].start, rows[i].start + rows[i].num_tokens) for i in order]
        kept = (np.cumsum([row.num_tokens for row in laid_out]) - 1).tolist()
        ids = np.concatenate(parts).astype(np.int64)
        logits = self.forward.forward(StepInput(ids, laid_out, [None] * len(rows), kept))
        back = [order.index(i) for i in range(len(rows))]
        found: torch.Tensor = logits[back]
        return found

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut or pad logits to the large model's width; tokens that the draft model lacks are never drawn."""
        if logits.shape[-1] >= self._width:
            return logits[:, : self._width].contiguous()
        return torch.nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=float("-inf"))

    def _has_room(self, sequence: SequenceState, num_drafts: int) -> bool:
        """Reserve KV for the sequence and ``num_drafts`` drafts; return whether there is room."""
        known = self._known.get(sequence.id)
        if known is None:
            # the draft model has no adapters, so the sequence's does not matter
            key = PrefixKey("", sequence.key.salt)
            cached = self.cache.acquire(sequence.id, key, sequence.tokens)
            if cached is None:
                return False
            known = self._known[sequence.id] = _Known(sequence, cached, sequence.tokens[:0])
        return self.cache.grow(sequence.id, sequence.num_tokens + num_drafts)

    def _look_back(self) -> None:
        """Keep the last drafts that were accepted, and release sequences that no longer run."""
        for owner, known in list(self._known.items()):
            known.keep_true()
            self.cache.computed(owner, known.sequence.tokens, known.length)
            if known.sequence.status != "running":
                self.cache.release(owner, keep=True)
                del self._known[owner]

    def close(self) -> None:
        """Free the memory."""
        self._known.clear()
        self.cache.close()
