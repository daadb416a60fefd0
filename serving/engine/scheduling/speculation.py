"""Speculative decoding: tokens that may come next are computed along with the one that does.

The output does not change. A token is a function of (logits, seed, position), so the true token is sampled at every
drafted position and a draft is accepted only if it equals that token; otherwise the tokens after it are dropped and
their KV is overwritten. This is exact at any temperature, unlike the rejection sampling of Leviathan et al. (2023),
which preserves the distribution but changes the text. Drafts come from the text that the caller expects
(``prediction``), from an earlier occurrence of the last tokens (prompt lookup, Saxena 2023), or from a small model
(``draft_model``).

Drafts are stored after the sequence's known tokens::

    known                       drafted
    [ … the quick brown fox ] [ jumps over the ]      one chunk of 1 + 3 tokens, with logits at 4 positions
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
from ..constraints.grammar_state import MaskedPosition
from ..constraints.logits_processors import LogitsProcessors
from .prompt_lookup import Prediction, lookup
from .sequence import Sampled, SequenceState

MAX_STEP_ROWS = 8  # tokens of a step with drafts; each beyond the first costs some 6 % of a single-token step
INITIAL_DRAFTS = 3  # size of the first proposal; doubled after full acceptance, else set to the accepted count
MIN_ACCEPTANCE = 0.15  # acceptance rate below which drafts do not pay
AVERAGE_WEIGHT = 0.15  # weight of the last proposal in the running average
INITIAL_PAUSE_TOKENS = 32  # tokens without drafts after low acceptance; doubled each time that it happens again


@dataclass(frozen=True, slots=True)
class DraftedPosition:
    """The position after ``ahead`` of a sequence's drafts, as if they had been sampled."""

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
    def grammar_state(self) -> MaskedPosition | None:
        grammar_state = self.sequence.grammar_state
        if grammar_state is None:
            return None
        assert grammar_state.ahead is not None
        assert grammar_state.ahead.positions is not None
        return grammar_state.ahead.positions[self.ahead - 1]

    @property
    def processors(self) -> LogitsProcessors | None:
        return self.sequence.processors


class GuessedPosition(DraftedPosition):
    """The position at which a draft model samples, without a grammar: drafts that it does not allow are dropped
    afterwards."""

    __slots__ = ()

    @property
    def grammar_state(self) -> MaskedPosition | None:
        return None


class Drafter(Protocol):
    """A draft model (``draft_model``). ``cost`` is the time of one of its steps relative to one of the target model."""

    @property
    def cost(self) -> float: ...
    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[TokenIds]:
        """Return for each sequence at most that many tokens that may come next, int32."""
        ...


Source: TypeAlias = Literal["prediction", "lookup", "model"]


@dataclass(slots=True)
class DraftRecord:
    """The acceptance history of a sequence's drafts from one source: ``rate`` is a running average of the accepted
    fraction, ``size`` the number to propose next. Below ``min_acceptance``, drafts do not pay."""

    min_acceptance: float = MIN_ACCEPTANCE
    rate: float = 0.5
    size: int = INITIAL_DRAFTS
    resume_at: int = 0
    pause: int = INITIAL_PAUSE_TOKENS

    def enter(self, proposed: int, taken: int, num_tokens: int) -> None:
        """Record that ``taken`` of ``proposed`` drafts were accepted, after ``num_tokens`` of the sequence."""
        self.rate += AVERAGE_WEIGHT * (taken / proposed - self.rate)
        self.size = min(2 * self.size, MAX_STEP_ROWS - 1) if taken == proposed else max(taken, 1)
        if self.rate < self.min_acceptance:
            self.rate, self.size = 0.5, INITIAL_DRAFTS
            self.resume_at = num_tokens + self.pause
            self.pause *= 2
        elif taken == proposed:
            self.pause = INITIAL_PAUSE_TOKENS


@dataclass(slots=True)
class SequenceDrafts:
    """The draft state of a sequence; ``source`` is where its last drafts came from."""

    prediction: Prediction | None
    source: Source = "lookup"
    records: dict[Source, DraftRecord] = field(default_factory=dict)
    counts: DraftCounts = field(default_factory=DraftCounts)

    @classmethod
    def of(cls, sequence: SequenceState) -> SequenceDrafts:
        """Return the draft state of ``sequence``, which stores it; create it on first use."""
        found: SequenceDrafts | None = sequence.drafted
        if found is None:
            draft = sequence.sampling.draft
            found = sequence.drafted = cls(Prediction(draft.token_ids) if draft is not None else None)
        return found

    def record(self, source: Source, min_acceptance: float = MIN_ACCEPTANCE) -> DraftRecord:
        return self.records.setdefault(source, DraftRecord(min_acceptance))


class Speculation:
    """The part that proposes and verifies drafts for the sequences of one engine, and counts ``num_proposed`` and
    ``num_taken`` tokens. ``model`` is used for sequences that have no other proposals."""

    def __init__(self, model: Drafter | None = None) -> None:
        self.model = model
        self.num_proposed = 0
        self.num_taken = 0

    def drafts(self, sequences: Sequence[SequenceState], max_drafts: int) -> list[TokenIds]:
        """Return for each sequence tokens that may come next, at most ``max_drafts`` for all together."""
        found: list[TokenIds] = []
        for i, sequence in enumerate(sequences):
            drafts = self._proposals(sequence, -(-max_drafts // (len(sequences) - i)))
            max_drafts -= len(drafts)
            found.append(drafts)
        if self.model is not None and max_drafts > 0:
            without = [i for i, drafts in enumerate(found) if not len(drafts)]
            guessed = self._model_proposals(self.model, [sequences[i] for i in without], max_drafts)
            for i, drafts in zip(without, guessed, strict=True):
                found[i] = drafts
        return found

    def _model_proposals(self, model: Drafter, sequences: Sequence[SequenceState], max_drafts: int) -> list[TokenIds]:
        """Return model drafts for sequences with recent acceptance."""
        wanted: dict[int, int] = {}
        for i, sequence in enumerate(sequences):
            record = SequenceDrafts.of(sequence).record("model", MIN_ACCEPTANCE + model.cost)
            size = min(-(-max_drafts // (len(sequences) - i)), record.size, _max_drafts(sequence))
            if sequence.num_tokens >= record.resume_at and size > 0 and sequence.group.table is None:
                wanted[sequence.id] = size
                max_drafts -= size
        asked = [sequence for sequence in sequences if sequence.id in wanted]
        guessed = model.propose([(sequence, wanted[sequence.id]) for sequence in asked])
        found = {s.id: _within_grammar(s, drafts) for s, drafts in zip(asked, guessed, strict=True)}
        for sequence in asked:
            SequenceDrafts.of(sequence).source = "model"
        return [found.get(sequence.id, sequence.tokens[:0]) for sequence in sequences]

    def _proposals(self, sequence: SequenceState, max_drafts: int) -> TokenIds:
        """Return at most ``max_drafts`` tokens that may come next, int32; none without a suggestion, or if drafts of
        this sequence have not paid lately."""
        found = self._cached_proposals(sequence, min(max_drafts, _max_drafts(sequence)))
        table = sequence.group.table
        if table is not None:  # virtual tokens of a prompt are never generated
            found = found[: int((np.append(found, table.first_id) >= table.first_id).argmax())]
        return _within_grammar(sequence, found)

    def _cached_proposals(self, sequence: SequenceState, max_drafts: int) -> TokenIds:
        """Return cached proposals of a sequence: from the caller's prediction, else by prompt lookup."""
        known = SequenceDrafts.of(sequence)
        if known.prediction is not None:
            known.prediction.follow(sequence.output, sequence.tokens)
            record = known.record("prediction")
            if sequence.num_tokens >= record.resume_at:
                known.source = "prediction"
                found = known.prediction.next(min(max_drafts, record.size))
                if len(found):
                    return found
        known.source = "lookup"
        record = known.record("lookup")
        if sequence.num_tokens < record.resume_at:
            return sequence.tokens[:0]
        return lookup(sequence.tokens, min(max_drafts, record.size))

    def verify(self, sequence: SequenceState, drafts: TokenIds, sampled: Sequence[Sampled]) -> Sequence[Sampled]:
        """Return the valid tokens among those ``sampled`` after the known tokens and after each draft: up to the first
        that differs from the draft, or to the draft that ends the text. Drafts after that one are no part of it, and
        do not count as accepted."""
        taken = 0
        while taken < min(len(drafts), len(sampled)) and sampled[taken].token_id == drafts[taken]:
            taken += 1
            if _ends(DraftedPosition(sequence, taken)):
                break
        self.num_proposed += len(drafts)
        self.num_taken += taken
        known = SequenceDrafts.of(sequence)
        predicted = known.source == "prediction"
        known.counts += DraftCounts(len(drafts), taken, len(drafts) * predicted, taken * predicted)
        known.record(known.source).enter(len(drafts), taken, sequence.num_tokens)
        return sampled[: taken + 1]


def _max_drafts(sequence: SequenceState) -> int:
    """Return how many drafts fit before the sequence's last token."""
    return sequence.num_prompt + sequence.stop_rule.max_tokens - sequence.num_tokens - 1


def _ends(position: DraftedPosition) -> bool:
    """Return whether the text ends with the draft before ``position``."""
    rule, output = position.stop_rule, position.output
    if rule.reason(int(output[-1]), len(output)) is not None:
        return True
    return rule.has_runs and rule.run_ending(output[-rule.max_run :], len(output)) > 0


def _within_grammar(sequence: SequenceState, drafts: TokenIds) -> TokenIds:
    return drafts if sequence.grammar_state is None else drafts[: sequence.grammar_state.draft(drafts.tolist())]
