"""One sequence while the engine runs it: its tokens, how far they are computed, what it waits for and what was sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ...interface.events import StepTiming, TokenLogprob
from ...interface.request import Sampling, Sequence, ValidRequest
from ...interface.stop_rule import StopReason, StopRule
from ..adapters.virtual_tokens import Table
from ..attention.kv_cache import PrefixKey, TokenIds
from ..constraints.grammar_state import MaskedPlace, Matching
from ..constraints.logits_processors import LogitsProcessors
from .tenants import GENERATED, Tenant

NOTHING_LEFT = -2  # in place of a token, where what the request forbids leaves none
MAX_UNSENT = 8  # of a reply that is not streamed: each message costs the reader's process time that the engine wants
Status = Literal["waiting", "running", "finished"]

# Legal moves; "running" goes back to "waiting" when its memory is taken for an earlier sequence (preemption).
MOVES: dict[Status, tuple[Status, ...]] = {
    "waiting": ("running", "finished"),
    "running": ("waiting", "finished"),
    "finished": (),
}

WaitReason = Literal["turn", "slot", "memory", "prefix", "grammar", "pictures"]
"""What a waiting sequence waits for: its turn in the queue, one of ``max_num_seqs`` places, KV memory for its prompt,
a prefix that a running sequence is just computing, or its grammar, which is being compiled."""

SHARED: frozenset[WaitReason] = frozenset({"slot", "memory"})
"""Reasons for which later sequences wait too, since they would take what this one waits for. For any other reason a
sequence waits alone and later ones pass it."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token that was drawn. ``token_id`` -1: the logits were not finite; ``NOTHING_LEFT``: none may come next.
    ``logprob`` is None unless asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Place(Protocol):
    """Where one token is drawn: what is known of its sequence up to there. A sequence is the place after its end."""

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
    def matching(self) -> MaskedPlace | None: ...
    @property
    def processors(self) -> LogitsProcessors | None: ...


class BeamSet(Protocol):
    """What the scheduler knows of members that are beams of one search (``beam_group``): they start, step and lose
    their memory together, and take ``width`` places of ``max_num_seqs``."""

    @property
    def width(self) -> int: ...
    def preempted(self) -> None:
        """They have lost their KV."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The unfinished sequences of one prompt (of a request's ``n`` choices), and all that is the same for them.

    ``beams``: the search whose beams they are, if it is one. ``key``: whose KV they may reuse, and who may reuse
    theirs. ``table``: what ids after the vocabulary's are in its prompt, ``num_learned`` how many of
    these its adapter has put there. ``max_model_len``: tokens, prompt and
    completion together. ``arrived_at``: seconds of ``time.monotonic()``. ``started``: which group of the
    scheduler it was to start, 0 before. ``processors``: its request's.
    """

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
        """Choice ``index`` of the request as a member; ``id`` is unique in the engine and orders arrivals."""
        member = SequenceState(self, index, id)
        self.members.append(member)
        return member


UNKNOWN = Tenant()


class SequenceState:
    """``num_tokens`` are known (prompt, resumed and sampled), the KV of ``num_computed`` of them exists.

    ``waits_for`` has a meaning while the status is "waiting". ``unsent`` are sampled and not yet in an event, nor are
    ``timings``, the steps that gave them; None where nobody asks. ``ready_at`` is when it got its last tokens, then.
    ``arrival`` sorts by provisioned first, then priority, then order of arrival. ``tenant`` is charged ``token_cost``
    for a token of the prompt that is computed, ``GENERATED`` times that for one that is generated (``tenants``).
    ``matching`` is where it is in its grammar, None until that is compiled and where there is none. A beam whose
    ``num_remaining`` is 0 waits for the others of its search; ``forked_from`` is the beam that a new one copies.
    ``prompt_scores`` (so far) and ``context_row`` (the next of the context's logits) are None where the prompt's are
    not wanted, or complete.
    """

    __slots__ = (
        "_tokens", "adapter", "arrival", "arrived_at", "context_row", "drafted", "first_step_at", "forced_from",
        "forked_from", "group", "id", "index", "key", "matching", "num_cached", "num_computed", "num_preemptions",
        "num_prompt", "num_resumed", "num_tokens", "processors", "prompt_scores", "provisioned", "ready_at",
        "request", "sampling", "seed", "status", "stop_rule", "tenant", "timings", "token_cost", "unsent",
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
        # beams come right after the first of their search, before all that arrived later
        self.arrival = (not request.provisioned, request.priority, group.members[0].id if group.beams else id, id)
        self.tenant = UNKNOWN  # the scheduler's queue says who it is
        self.token_cost = 1.0 / request.weight
        self.forked_from: SequenceState | None = None
        self.drafted: Any = None  # of its drafts (speculation.SequenceDrafts)
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
        self.matching: Matching | None = None
        self.forced_from = 0  # the place from which on its grammar decided all tokens that are not computed

    def move(self, status: Status) -> None:
        """Raises ``RuntimeError`` for a move that is not in ``MOVES``."""
        if status not in MOVES[self.status]:
            raise RuntimeError(f"a {self.status} sequence cannot become {status}")
        self.status = status
        self.waits_for = "turn"

    @property
    def precedence(self) -> tuple[bool, int, int, int]:
        """Sorts those that have started, by provisioned and priority, then as they did: who comes last gives up its
        memory first. The same for as long as they live, so that the first of them always gets to its end."""
        return (*self.arrival[:2], self.group.started, self.id)

    @property
    def start_cost(self) -> float:
        """What its tenant will be charged when it starts, at most; one that was let in before is charged nothing."""
        if self.first_step_at is not None or self.num_resumed:
            return 0.0
        return self.num_prompt * self.token_cost

    def charge(self, generated: int) -> None:
        """``generated`` tokens are its tenant's."""
        self.tenant.used += GENERATED * generated * self.token_cost

    @property
    def tokens(self) -> TokenIds:
        """All known token ids, int32 [num_tokens], a view."""
        return self._tokens[: self.num_tokens]

    def slice(self, start: int, stop: int) -> TokenIds:
        """Token ids of positions ``[start, stop)``, int32, a view; those after the known ones are drafts."""
        return self._tokens[start:stop]

    def draft(self, token_ids: TokenIds) -> None:
        """Put drafts after the known tokens."""
        self._tokens[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids

    @property
    def output(self) -> TokenIds:
        """Sampled token ids, resumed ones included, int32 [num_generated], a view."""
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_generated(self) -> int:
        """Sampled tokens, resumed ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def generates(self) -> bool:
        """Whether it goes on after its prompt; one of ``max_tokens`` 0 is scored alone."""
        return self.stop_rule.max_tokens > 0

    @property
    def reads_prompt(self) -> bool:
        """Whether every token of its prompt needs logits."""
        return self.prompt_scores is not None or self.context_row is not None

    @property
    def max_reuse(self) -> int | None:
        """Tokens that it may take from the prefix cache: those whose logits are wanted are computed. None for all."""
        return 0 if self.prompt_scores is not None else self.context_row

    @property
    def may_hold(self) -> bool:
        """Whether tokens may be sent a few at a time: they are not streamed, and no stop string may end the text."""
        return not self.request.stream and not self.request.stop and len(self.unsent) < MAX_UNSENT

    @property
    def num_remaining(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return self.num_tokens - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether it has its prompt: it goes on by a token, or by the few that its grammar has decided."""
        return self.num_remaining == 1 or 0 < self.forced_from <= self.num_computed

    def extend(self, sampled: Iterable[Sampled]) -> StopReason | None:
        """Take the tokens that one step gave, up to the one that ends the sequence; what follows it is dropped.

        Returns why it ends there, or None when it goes on.
        """
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
        return self.stop_rule.run_ending(self.output[-self.stop_rule.longest_run :], self.num_generated) > 0

    def follow(self, known: int, reason: StopReason | None) -> StopReason | None:
        """Take the tokens from place ``known`` on into the grammar, and append those that it alone decides.

        ``reason`` is why the sequence ends with its last token, if it does. Returns why it ends then: a text that its
        grammar does not let go on is complete ("stop"), whatever else. Raises ``ServingError``.
        """
        matching = self.matching
        if matching is None or reason == "stop":
            return reason
        matching.consume(self._tokens[known : self.num_tokens].tolist())
        while not matching.is_complete and reason is None and (forced := matching.forced()):
            first = self.num_tokens
            reason = self.extend(Sampled(token_id) for token_id in forced)
            if reason == "stop":
                return reason
            self.forced_from = known
            matching.consume(forced[: self.num_tokens - first])
        if matching.is_complete:
            return "stop"
        return reason

    def note_step(self, began: float, now: float, batch_size: int) -> None:
        """Take note of the step that has just given it tokens, where the request asks for ``timings``. ``began`` and
        ``now`` are seconds of ``time.monotonic()``."""
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
        self.prompt_scores = self.context_row = None  # the first beam's are all beams'
        if self.status == "running":
            self.num_computed = source.num_computed
        else:
            self.forked_from = source
            self.first_step_at = source.first_step_at

    def append(self, token_id: int) -> None:
        """Take one token that a search chose."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def stop_reason(self) -> StopReason | None:
        """Why the sequence ends with its last known token, or None when it goes on."""
        count = self.num_generated
        if self.stop_rule.has_runs and self._ends_run():
            return "stop"
        return self.stop_rule.reason(int(self._tokens[self.num_tokens - 1]) if count else None, count)
