"""The sequences of a request in vLLM: what each has so far, and the events that it owes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...interface.engine import Client
from ...interface.events import Event, Finished, FinishReason, StepTiming, Timed, TokenLogprob, Tokens
from ...interface.request import ValidRequest
from ...interface.stop_rule import StopReason, StopRule
from ..constraints.grammar_state import GrammarState
from ..constraints.grammars import Compilation
from ..scheduling.sequence import MAX_UNSENT


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A request that the engine has accepted. ``adapter`` is the key that it claims, ``compilation`` that of its
    grammar. ``sequences`` are those that have not ended."""

    request: ValidRequest
    client: Client
    adapter: str = ""
    sequences: list[VllmSequence] = field(default_factory=list)
    compilation: Compilation | None = None


class VllmSequence:
    """One sequence, which is one request of vLLM's, by the id ``key``.

    ``generated`` has all tokens, resumed ones included. ``is_running``: whether vLLM has it."""

    def __init__(self, owner: VllmRequest, index: int, key: str, max_model_len: int) -> None:
        request = owner.request
        source = request.sequences[index]
        self.owner, self.index, self.key = owner, index, key
        self.prompt, self.seed = source.prompt_token_ids, source.seed
        self.sampling = request.sampling
        self.room = max_model_len - len(self.prompt)
        self.stop_rule = None if self.sampling is None else StopRule(self.sampling, self.room)
        self.generated = list(source.resumed_token_ids)
        self.num_resumed = len(self.generated)
        self.grammar_state: GrammarState | None = None
        self.num_cached = 0
        self.is_running = False
        self.queued_at = self.ready_at = time.monotonic()
        self.started_at: float | None = None
        self._unsent: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._timings: list[StepTiming] = []

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt's tokens are to be scored."""
        return self.sampling is not None and self.sampling.prompt_logprobs is not None

    def stop_reason(self) -> StopReason | None:
        """Return why the sequence ends with its last token, or None if it goes on."""
        rule = self.stop_rule
        assert rule is not None
        count = len(self.generated)
        if rule.has_runs and rule.run_ending(self.generated[-rule.max_run :], count):
            return "stop"
        return rule.reason(self.generated[-1] if count else None, count)

    def extend(self, token_id: int, logprob: TokenLogprob | None) -> StopReason | None:
        """Append a token, follow the grammar, and return why the text ends with it. Raises ``ServingError`` for a token
        that the grammar does not allow."""
        self.generated.append(token_id)
        self._unsent.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        reason = self.stop_reason()
        if self.grammar_state is None or reason == "stop":
            return reason
        self.grammar_state.consume([token_id])
        return "stop" if self.grammar_state.is_complete else reason

    def note_step(self, began: float, now: float, batch_size: int) -> None:
        """Record the step that just gave a token."""
        since, self.ready_at = self.ready_at, now
        self._timings.append(StepTiming(max(began - since, 0.0), now - since, batch_size))

    @property
    def may_hold(self) -> bool:
        """Whether tokens may be sent several at a time."""
        request = self.owner.request
        return not request.stream and not request.stop and len(self._unsent) < MAX_UNSENT

    def flush(self) -> list[Event]:
        """Return the events of the tokens that were held back."""
        if not self._unsent:
            return []
        events: list[Event] = []
        if self._timings:
            events.append(Timed(self.index, tuple(self._timings)))
        is_first = len(self.generated) - len(self._unsent) == self.num_resumed
        cached = self.num_cached if is_first else None
        events.append(Tokens(self.index, tuple(self._unsent), tuple(self._logprobs), cached))
        self._unsent, self._logprobs, self._timings = [], [], []
        return events

    def finished(self, reason: FinishReason) -> Finished:
        """Return the event of the sequence's end."""
        waited = (self.started_at or time.monotonic()) - self.queued_at
        return Finished(self.index, reason, self.num_cached, len(self.generated), waited)
