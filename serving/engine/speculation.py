"""Speculation by n-grams: tokens that followed the same words before are computed along with the next one.

Nothing is changed by it. A token is a function of (logits, seed, position), so the true token is drawn at every drafted
place, and a draft is only taken where it is that token; where it is not, the tokens after it are dropped, and what was
computed for them is written over. This is exact at any temperature, without the rejection sampling of Leviathan et al.
(2023), which keeps the distribution and changes the text. Prompt lookup (Saxena 2023) is where the drafts come from.

Drafts stand in the sequence's tokens after those that are known::

    known                       drafted
    [ … the quick brown fox ] [ jumps over the ]      one run of 1 + 3 tokens, with logits at 4 places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..request import Sampling
from ..stop_rule import StopRule
from .kv_cache import TokenIds
from .logits_processors import LogitsProcessors
from .matching import Matching
from .sequence import Sampled, SequenceState

MATCH = 3  # tokens that an earlier place must share with the end of the text
ROWS = 8  # tokens of a step in all; each beside the first costs some 6 % of a step of one
FIRST = 3  # drafts of a sequence's first proposal; twice as many after one that held, as many as held after another
LEAST = 0.15  # drafts taken of those proposed: fewer do not pay
WEIGHT = 0.15  # of the last proposal in the running average
PAUSE = 32  # tokens without drafts after too few were taken; twice as many each time that it happens again


@dataclass(frozen=True, slots=True)
class DraftedPlace:
    """The place after ``ahead`` of a sequence's drafts, as if they had been drawn."""

    sequence: SequenceState
    ahead: int

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def stop_rule(self) -> StopRule:
        return self.sequence.stop_rule

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def num_prompt(self) -> int:
        return self.sequence.num_prompt

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens + self.ahead

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def tokens(self) -> TokenIds:
        return self.sequence.slice(0, self.num_tokens)

    @property
    def output(self) -> TokenIds:
        return self.sequence.slice(self.num_prompt, self.num_tokens)

    @property
    def matching(self) -> Matching | None:
        return None

    @property
    def processors(self) -> LogitsProcessors | None:
        return self.sequence.processors


@dataclass(slots=True)
class DraftRecord:
    """How a sequence's drafts have fared: ``rate`` is a running average of the part that was taken, ``size`` how many
    are proposed next."""

    rate: float = 0.5
    size: int = FIRST
    resume_at: int = 0
    pause: int = PAUSE


class Speculation:
    """Drafts for the sequences of one engine, and the account of them: ``num_proposed`` and ``num_taken`` tokens."""

    def __init__(self) -> None:
        self.num_proposed = 0
        self.num_taken = 0

    def drafts(self, sequence: SequenceState, most: int) -> TokenIds:
        """At most ``most`` tokens that may come next, int32; none where nothing suggests any, or where drafts of this
        sequence have not paid lately."""
        record = sequence.drafted
        if record is None:
            record = sequence.drafted = DraftRecord()
        if sequence.num_tokens < record.resume_at:
            return sequence.tokens[:0]
        room = sequence.num_prompt + sequence.stop_rule.max_tokens - sequence.num_tokens - 1
        found = lookup(sequence.tokens, min(most, room, record.size))
        table = sequence.group.table
        return found if table is None else found[: int((np.append(found, table.first_id) >= table.first_id).argmax())]

    def verify(self, sequence: SequenceState, drafts: TokenIds, sampled: Sequence[Sampled]) -> Sequence[Sampled]:
        """Of the tokens ``sampled`` at the place after the known tokens and after each draft, those that hold: up to
        the first that is not what was drafted there."""
        taken = 0
        while taken < len(drafts) and sampled[taken].token_id == drafts[taken]:
            taken += 1
        self.num_proposed += len(drafts)
        self.num_taken += taken
        record = sequence.drafted
        assert record is not None
        record.rate += WEIGHT * (taken / len(drafts) - record.rate)
        record.size = min(2 * record.size, ROWS - 1) if taken == len(drafts) else max(taken, 1)
        if record.rate < LEAST:
            record.rate, record.size = 0.5, FIRST
            record.resume_at = sequence.num_tokens + record.pause
            record.pause *= 2
        elif taken == len(drafts):
            record.pause = PAUSE
        return sampled[: taken + 1]


def lookup(tokens: TokenIds, most: int) -> TokenIds:
    """What followed the last ``MATCH`` of ``tokens`` where they came last before, at most ``most`` tokens."""
    if most < 1 or len(tokens) <= MATCH:
        return tokens[:0]
    size = len(tokens) - MATCH
    found = tokens[:size] == tokens[-MATCH]
    for place in range(1, MATCH):
        found &= tokens[place : place + size] == tokens[place - MATCH]
    places = np.flatnonzero(found)
    if not len(places):
        return tokens[:0]
    start = int(places[-1]) + MATCH
    return tokens[start : start + most]
