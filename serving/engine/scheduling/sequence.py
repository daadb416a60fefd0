"""The state of one sequence: its tokens, how far they are computed, what it waits for and what has been sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct

from ...interface.events import StepTiming, TokenLogprob
from ...interface.request import Sampling, Sequence, ValidRequest
from ...interface.stop_rule import StopReason, StopRule
from ..adapters.virtual_tokens import Table
from ..attention.kv_cache import PrefixKey, TokenIds
from ..constraints.grammar_state import GrammarState, MaskedPosition
from ..constraints.logits_processors import LogitsProcessors
from .tenants import GENERATED_TOKEN_WEIGHT, Tenant

NO_ALLOWED_TOKEN = -2  # in place of a token, if the request forbids all of them
MAX_UNSENT = 8  # tokens held back unless streamed: each message costs CPU time of the reader, which the engine wants
Status = Literal["waiting", "running", "finished"]

# Legal transitions. A running sequence goes back to waiting when it is preempted for an earlier one.
MOVES: dict[Status, tuple[Status, ...]] = {
    "waiting": ("running", "finished"),
    "running": ("waiting", "finished"),
    "finished": (),
}

WaitReason = Literal["turn", "slot", "memory", "prefix", "grammar", "images"]
"""The reason for which a sequence waits: its turn, one of ``max_num_seqs`` slots, KV memory for its prompt, a
prefix that a running sequence is computing, the compilation of its grammar, or the encoding of its images."""

BLOCKS_LATER: frozenset[WaitReason] = frozenset({"slot", "memory"})
"""Reasons for which later sequences wait too, since they would take what this one waits for. With any other reason,
later sequences pass this one."""


class Sampled(Struct, frozen=True):
    """One sampled token. ``token_id`` is -1 if the logits were not finite, ``NO_ALLOWED_TOKEN`` if every token is
    forbidden. ``logprob`` is None unless requested."""

    token_id: int
    logprob: TokenLogprob | None = None


class SamplePosition(Protocol):
    """The context for sampling one token: what is known of its sequence up to there. A sequence is the position after
    its end."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def stop_rule(self) -> StopRule: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_generated(self) -> int: ...
    @property
    def tokens(self) -> TokenIds: ...
    @property
    def output(self) -> TokenIds: ...
    @property
    def grammar_state(self) -> MaskedPosition | None: ...
    @property
    def processors(self) -> LogitsProcessors | None: ...


class BeamSet(Protocol):
    """The beams of one search as the scheduler sees them (``beam_group``): they start, step and are preempted together,
    and take ``width`` of the ``max_num_seqs`` slots."""

    @property
    def width(self) -> int: ...
    def preempted(self) -> None:
        """Handle the loss of their KV."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The unfinished sequences of one prompt (of a request's ``n`` choices), and what they share.

    ``beams``: the search that they are beams of, if any. ``key`` determines whose KV they may reuse and who may reuse
    theirs. ``table``: the vectors of the prompt's ids after the vocabulary, of which ``num_learned`` come from its
    adapter. ``max_model_len``: tokens of prompt and completion together. ``arrived_at``: seconds of
    ``time.monotonic()``. ``started``: the group's number in the order of starts, 0 before. ``processors``: those of the
    request."""

    request: ValidRequest
    sampling: Sampling
    key: PrefixKey
    max_model_len: int
    arrived_at: float
    members: list[SequenceState] = field(default_factory=list)
    beams: BeamSet | None = None
    started: int = 0
    processors: LogitsProcessors | None = None
    table: Table | None = None
    num_learned: int = 0

    def add(self, index: int, id: int) -> SequenceState:
        """Add choice ``index`` of the request; ``id`` is unique in the engine and orders arrivals."""
        member = SequenceState(self, index, id)
        self.members.append(member)
        return member


UNKNOWN = Tenant()


class SequenceState:
    """A sequence of which ``num_tokens`` are known (prompt, resumed and sampled) and the KV of ``num_computed`` exists.

    ``waits_for`` is meaningful while the status is "waiting". ``unsent`` are sampled tokens that no event contains yet,
    ``timings`` the steps that gave them, None unless requested; ``ready_at`` is then when the last tokens came.
    ``arrival`` sorts by service class, then priority, then order of arrival. ``tenant`` is charged ``token_cost`` for
    each computed token of the prompt, ``GENERATED_TOKEN_WEIGHT`` times that for a generated one (``tenants``).
    ``grammar_state`` is its position in its grammar, None until that is compiled and without one. A beam whose
    ``num_remaining`` is 0 waits for the others of its search; ``forked_from`` is the beam that a new one copies.
    ``prompt_scores`` (so far) and ``context_row`` (the next of the context's logits) are None if not requested, or
    complete."""

    __slots__ = (
        "_tokens",
        "adapter",
        "arrival",
        "arrived_at",
        "context_row",
        "drafted",
        "first_step_at",
        "forced_from",
        "forked_from",
        "grammar_state",
        "group",
        "id",
        "index",
        "key",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_resumed",
        "num_tokens",
        "processors",
        "prompt_scores",
        "provisioned",
        "ready_at",
        "request",
        "sampling",
        "seed",
        "service_class",
        "status",
        "stop_rule",
        "tenant",
        "timings",
        "token_cost",
        "unsent",
        "waits_for",
    )  # fmt: skip

    def __init__(self, group: SequenceGroup, index: int, id: int) -> None:
        request = group.request
        source: Sequence = request.sequences[index]
        self.group, self.index, self.id = group, index, id
        self.request, self.sampling, self.key = request, group.sampling, group.key
        self.processors = group.processors
        self.adapter = group.key.adapter or None
        self.provisioned = request.provisioned
        self.service_class = request.service_class
        # beams come right after the first of their search, before later arrivals
        self.arrival = (self.service_class, request.priority, group.members[0].id if group.beams else id, id)
        self.tenant = UNKNOWN  # set by the scheduler's queue
        self.token_cost = 1.0 / request.weight
        self.forked_from: SequenceState | None = None
        self.drafted: Any = None  # speculation.SequenceDrafts
        self.arrived_at = group.arrived_at
        self.first_step_at: float | None = None
        self.seed = source.seed
        self.num_prompt = len(source.prompt_token_ids)
        self.stop_rule = StopRule(group.sampling, group.max_model_len - self.num_prompt)
        self.num_resumed = len(source.resumed_token_ids)
        self.num_tokens = self.num_prompt + self.num_resumed
        self._tokens = np.empty(max(self.num_prompt + self.stop_rule.max_tokens, self.num_tokens) + 1, dtype=np.int32)
        self._tokens[: self.num_tokens] = source.prompt_token_ids + source.resumed_token_ids
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.unsent: list[Sampled] = []
        self.timings: list[StepTiming] | None = [] if request.timings else None
        self.ready_at = group.arrived_at
        self.prompt_scores: list[Any] | None = [] if group.sampling.prompt_logprobs is not None else None
        row = source.context_logits_from
        self.context_row: int | None = row if group.sampling.context_logits and row < self.num_prompt else None
        self.status: Status = "waiting"
        self.waits_for: WaitReason = "turn"
        self.grammar_state: GrammarState | None = None
        self.forced_from = 0  # position from which its grammar has forced all tokens that are not computed yet

    def move(self, status: Status) -> None:
        """Change the status. Raises ``RuntimeError`` for a transition that is not in ``MOVES``."""
        if status not in MOVES[self.status]:
            raise RuntimeError(f"a {self.status} sequence cannot become {status}")
        self.status = status
        self.waits_for = "turn"

    @property
    def precedence(self) -> tuple[int, int, int, int]:
        """Return the sort key of started sequences: class and priority, then order of starts. The last one is
        preempted first. It never changes, so that the first sequence always completes."""
        return (*self.arrival[:2], self.group.started, self.id)

    @property
    def start_cost(self) -> float:
        """Return an upper bound of the tenant's charge at the start; 0 on readmission."""
        if self.first_step_at is not None or self.num_resumed:
            return 0.0
        return self.num_prompt * self.token_cost

    def charge(self, generated: int) -> None:
        """Charge its tenant for ``generated`` tokens."""
        self.tenant.used += GENERATED_TOKEN_WEIGHT * generated * self.token_cost

    @property
    def tokens(self) -> TokenIds:
        """Return all known token ids, int32 [num_tokens], as a view."""
        return self._tokens[: self.num_tokens]

    def slice(self, start: int, stop: int) -> TokenIds:
        """Return the token ids at positions ``[start, stop)``, int32, as a view; those after the known ones are
        drafts."""
        return self._tokens[start:stop]

    def draft(self, token_ids: TokenIds) -> None:
        """Store drafts after the known tokens."""
        self._tokens[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids

    @property
    def output(self) -> TokenIds:
        """Return the sampled token ids, including resumed ones, int32 [num_generated], as a view."""
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_generated(self) -> int:
        """Return the number of sampled tokens, including resumed ones."""
        return self.num_tokens - self.num_prompt

    @property
    def generates(self) -> bool:
        """Return whether tokens are generated after the prompt; with ``max_tokens`` 0 it is only scored."""
        return self.stop_rule.max_tokens > 0

    @property
    def reads_prompt(self) -> bool:
        """Return whether every token of the prompt needs logits."""
        return self.prompt_scores is not None or self.context_row is not None

    @property
    def max_reuse(self) -> int | None:
        """Return how many tokens may come from the prefix cache, None for all: tokens whose logits are wanted are
        computed."""
        return 0 if self.prompt_scores is not None else self.context_row

    @property
    def may_hold(self) -> bool:
        """Return whether tokens may be sent several at a time: without streaming or stop strings."""
        return not self.request.stream and not self.request.stop and len(self.unsent) < MAX_UNSENT

    @property
    def num_remaining(self) -> int:
        """Return the number of known tokens whose KV has not been computed."""
        return self.num_tokens - self.num_computed

    @property
    def decodes(self) -> bool:
        """Return whether the prompt is computed, so that it continues by a token or by those that its grammar
        forced."""
        return self.num_remaining == 1 or 0 < self.forced_from <= self.num_computed

    def extend(self, sampled: Iterable[Sampled]) -> StopReason | None:
        """Append the tokens of one step, up to the one that ends the sequence; later ones are dropped. Return why it
        ends there, or None if it continues."""
        for one in sampled:
            token_id = one.token_id
            self._tokens[self.num_tokens] = token_id
            self.num_tokens += 1
            self.unsent.append(one)
            reason = self.stop_rule.reason(token_id, self.num_tokens - self.num_prompt)
            if self.stop_rule.has_runs and self._ends_run():
                return "stop"
            if reason is not None:
                return reason
        return None

    def _ends_run(self) -> bool:
        return self.stop_rule.run_ending(self.output[-self.stop_rule.max_run :], self.num_generated) > 0

    def follow(self, known: int, reason: StopReason | None) -> StopReason | None:
        """Advance the grammar by the tokens from position ``known`` on, and append the tokens that it forces.

        ``reason`` is why the sequence ends with its last token, if it does. Return why it ends then: a text that its
        grammar does not let continue is complete ("stop"), whatever else. Raises ``ServingError``."""
        grammar_state = self.grammar_state
        if grammar_state is None or reason == "stop":
            return reason
        grammar_state.consume(self._tokens[known : self.num_tokens].tolist())
        while not grammar_state.is_complete and reason is None and (forced := grammar_state.forced()):
            first = self.num_tokens
            reason = self.extend(Sampled(token_id) for token_id in forced)
            if reason == "stop":
                return reason
            self.forced_from = known
            grammar_state.consume(forced[: self.num_tokens - first])
        if grammar_state.is_complete:
            return "stop"
        return reason

    def note_step(self, began: float, now: float, batch_size: int) -> None:
        """Record the step that just gave it tokens, if the request asks for ``timings``. ``began`` and ``now`` are
        seconds of ``time.monotonic()``."""
        if self.timings is None:
            return
        is_first = self.ready_at == self.arrived_at
        started = self.first_step_at if is_first and self.first_step_at is not None else began
        self.timings.append(StepTiming(started - self.ready_at, now - self.ready_at, batch_size))
        self.ready_at = now

    def become(self, source: SequenceState) -> None:
        """Take over the known tokens of another beam of the same prompt."""
        self._tokens[self.num_prompt : source.num_tokens] = source.output
        self.num_tokens = source.num_tokens
        self.prompt_scores = self.context_row = None  # the first beam's count for all beams
        if self.status == "running":
            self.num_computed = source.num_computed
        else:
            self.forked_from = source
            self.first_step_at = source.first_step_at

    def append(self, token_id: int) -> None:
        """Append a token chosen by a beam search."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def stop_reason(self) -> StopReason | None:
        """Return why the sequence ends with its last known token, or None if it continues."""
        count = self.num_generated
        if self.stop_rule.has_runs and self._ends_run():
            return "stop"
        return self.stop_rule.reason(int(self._tokens[self.num_tokens - 1]) if count else None, count)
