"""Speculation: tokens that may come next are computed along with the one that does.

Nothing is changed by it. A token is a function of (logits, seed, position), so the true token is drawn at every drafted
place, and a draft is only taken where it is that token; where it is not, the tokens after it are dropped, and what was
computed for them is written over. This is exact at any temperature, without the rejection sampling of Leviathan et al.
(2023), which keeps the distribution and changes the text. Drafts come from what the caller expects the text to be
(``prediction``), from where its last words stood before (prompt lookup, Saxena 2023), or of a small model
(``draft_model``).

Drafts stand in the sequence's tokens after those that are known::

    known                       drafted
    [ … the quick brown fox ] [ jumps over the ]      one run of 1 + 3 tokens, with logits at 4 places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ...interface.events import DraftCounts
from ...interface.request import Sampling
from ...interface.stop_rule import StopRule
from ..attention.kv_cache import TokenIds
from ..constraints.grammar_state import MaskedPlace
from ..constraints.logits_processors import LogitsProcessors
from .prompt_lookup import Prediction, lookup
from .sequence import Sampled, SequenceState

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
    def matching(self) -> MaskedPlace | None:
        matching = self.sequence.matching
        if matching is None:
            return None
        assert matching.ahead is not None
        assert matching.ahead.places is not None
        return matching.ahead.places[self.ahead - 1]

    @property
    def processors(self) -> LogitsProcessors | None:
        return self.sequence.processors


class GuessedPlace(DraftedPlace):
    """The place where a draft model draws, which no grammar restricts: what one does not allow is left out after."""

    __slots__ = ()

    @property
    def matching(self) -> MaskedPlace | None:
        return None


class Drafter(Protocol):
    """A small model (``draft_model``). ``cost``: one of its steps in those of the large one."""

    @property
    def cost(self) -> float: ...
    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[TokenIds]:
        """For each sequence at most so many tokens that may come next, int32."""
        ...


Source: TypeAlias = Literal["prediction", "lookup", "model"]


@dataclass(slots=True)
class DraftRecord:
    """How a sequence's drafts of one source have fared: ``rate`` is a running average of the part that was taken,
    ``size`` how many are proposed next. With less than ``least`` taken they do not pay."""

    least: float = LEAST
    rate: float = 0.5
    size: int = FIRST
    resume_at: int = 0
    pause: int = PAUSE

    def enter(self, proposed: int, taken: int, num_tokens: int) -> None:
        """``taken`` of ``proposed`` drafts were drawn, after ``num_tokens`` of the sequence."""
        self.rate += WEIGHT * (taken / proposed - self.rate)
        self.size = min(2 * self.size, ROWS - 1) if taken == proposed else max(taken, 1)
        if self.rate < self.least:
            self.rate, self.size = 0.5, FIRST
            self.resume_at = num_tokens + self.pause
            self.pause *= 2
        elif taken == proposed:
            self.pause = PAUSE


@dataclass(slots=True)
class SequenceDrafts:
    """All that is known of a sequence's drafts; ``source`` is where the last came from."""

    prediction: Prediction | None
    source: Source = "lookup"
    records: dict[Source, DraftRecord] = field(default_factory=dict)
    counts: DraftCounts = field(default_factory=DraftCounts)

    @classmethod
    def of(cls, sequence: SequenceState) -> SequenceDrafts:
        """Those of ``sequence``, which keeps them."""
        found: SequenceDrafts | None = sequence.drafted
        if found is None:
            draft = sequence.sampling.draft
            found = sequence.drafted = cls(Prediction(draft.token_ids) if draft is not None else None)
        return found

    def record(self, source: Source, least: float = LEAST) -> DraftRecord:
        return self.records.setdefault(source, DraftRecord(least))


class Speculation:
    """Drafts for the sequences of one engine, and the account of them: ``num_proposed`` and ``num_taken`` tokens.
    ``model`` is asked for those of which nothing else suggests any."""

    def __init__(self, model: Drafter | None = None) -> None:
        self.model = model
        self.num_proposed = 0
        self.num_taken = 0

    def drafts(self, sequences: Sequence[SequenceState], most: int) -> list[TokenIds]:
        """For each sequence tokens that may come next, at most ``most`` of all together."""
        found: list[TokenIds] = []
        for i, sequence in enumerate(sequences):
            drafts = self._found(sequence, -(-most // (len(sequences) - i)))
            most -= len(drafts)
            found.append(drafts)
        if self.model is not None and most > 0:
            without = [i for i, drafts in enumerate(found) if not len(drafts)]
            guessed = self._guessed(self.model, [sequences[i] for i in without], most)
            for i, drafts in zip(without, guessed, strict=True):
                found[i] = drafts
        return found

    def _guessed(self, model: Drafter, sequences: Sequence[SequenceState], most: int) -> list[TokenIds]:
        """What the model says, of those sequences that its drafts have helped lately."""
        wanted: dict[int, int] = {}
        for i, sequence in enumerate(sequences):
            record = SequenceDrafts.of(sequence).record("model", LEAST + model.cost)
            size = min(-(-most // (len(sequences) - i)), record.size, _room(sequence))
            if sequence.num_tokens >= record.resume_at and size > 0 and sequence.group.table is None:
                wanted[sequence.id] = size
                most -= size
        asked = [sequence for sequence in sequences if sequence.id in wanted]
        guessed = model.propose([(sequence, wanted[sequence.id]) for sequence in asked])
        found = {s.id: _within_grammar(s, drafts) for s, drafts in zip(asked, guessed, strict=True)}
        for sequence in asked:
            SequenceDrafts.of(sequence).source = "model"
        return [found.get(sequence.id, sequence.tokens[:0]) for sequence in sequences]

    def _found(self, sequence: SequenceState, most: int) -> TokenIds:
        """At most ``most`` tokens that may come next, int32; none where nothing suggests any, or where drafts of this
        sequence have not paid lately."""
        found = self._suggested(sequence, min(most, _room(sequence)))
        table = sequence.group.table
        if table is not None:  # a prompt's virtual tokens are no words
            found = found[: int((np.append(found, table.first_id) >= table.first_id).argmax())]
        return _within_grammar(sequence, found)

    def _suggested(self, sequence: SequenceState, room: int) -> TokenIds:
        known = SequenceDrafts.of(sequence)
        if known.prediction is not None:
            known.prediction.follow(sequence.output, sequence.tokens)
            record = known.record("prediction")
            if sequence.num_tokens >= record.resume_at:
                known.source = "prediction"
                found = known.prediction.next(min(room, record.size))
                if len(found):
                    return found
        known.source = "lookup"
        record = known.record("lookup")
        if sequence.num_tokens < record.resume_at:
            return sequence.tokens[:0]
        return lookup(sequence.tokens, min(room, record.size))

    def verify(self, sequence: SequenceState, drafts: TokenIds, sampled: Sequence[Sampled]) -> Sequence[Sampled]:
        """Of the tokens ``sampled`` at the place after the known tokens and after each draft, those that hold: up to
        the first that is not what was drafted there."""
        taken = 0
        while taken < min(len(drafts), len(sampled)) and sampled[taken].token_id == drafts[taken]:
            taken += 1
        self.num_proposed += len(drafts)
        self.num_taken += taken
        known = SequenceDrafts.of(sequence)
        predicted = known.source == "prediction"
        known.counts += DraftCounts(len(drafts), taken, len(drafts) * predicted, taken * predicted)
        known.record(known.source).enter(len(drafts), taken, sequence.num_tokens)
        return sampled[: taken + 1]


def _room(sequence: SequenceState) -> int:
    """Drafts that may be there before the sequence's last token."""
    return sequence.num_prompt + sequence.stop_rule.max_tokens - sequence.num_tokens - 1


def _within_grammar(sequence: SequenceState, drafts: TokenIds) -> TokenIds:
    return drafts if sequence.matching is None else drafts[: sequence.matching.draft(drafts.tolist())]
