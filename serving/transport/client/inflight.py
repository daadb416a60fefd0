"""One in-flight request of a client: what was delivered, and what to submit when the engine has to start over."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from ...interface.errors import ServingError
from ...interface.events import DraftCounts, Event, Failed, Finished, FinishReason, Logits, PromptScored, Timed, Tokens
from ...interface.request import POOLED, LogitsOf, Sampling, ValidRequest
from ...interface.stop_rule import StopRule

Phase = Literal["running", "pausing", "paused"]

# "pausing": the engine was asked to end the sequences, and the events already under way still arrive. A paused request
# has nothing in the engine, so that others can use its place there; later it is submitted again as a continuation.
MOVES: dict[Phase, tuple[Phase, ...]] = {
    "running": ("pausing", "paused"),
    "pausing": ("paused",),
    "paused": ("running",),
}


class EventSink(Protocol):
    """The receiver of a request's events. It is called on the client's own thread and must not block.

    ``put`` returns True if the event was handled at once and does not wait for a reader. ``is_full`` asks for a pause,
    which is shown to the reader in ``paused``; ``is_drained`` withdraws it.
    """

    paused: bool

    def put(self, event: Event, /) -> bool | None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def is_drained(self) -> bool: ...


class InflightRequest:
    """A request, the tokens delivered so far and its state in the engine.

    ``attempt`` maps the sequence numbers of the current submission to those of the request. A step may give a sequence
    any number of tokens.
    """

    # a step touches one of these per stream; small objects stay in the CPU's caches
    __slots__ = (
        "_cached", "_drafts", "_own_drafts", "_parked", "_rows", "_sole", "attempt", "delivered", "ending", "failed",
        "number", "open", "phase", "request", "restarts", "scored", "sent", "sink", "submitted", "wanted",
    )  # fmt: skip

    def __init__(self, request: ValidRequest, number: int, sink: EventSink) -> None:
        self.request, self.number, self.sink = request, number, sink
        self.delivered: list[list[int]] = [[] for _ in request.sequences]
        self._sole = self.delivered[0] if len(self.delivered) == 1 else None
        self.open = set(range(len(request.sequences)))
        self.attempt = list(range(len(request.sequences)))
        self.ending: set[int] = set()  # sequences the caller has asked to end
        self.scored: set[int] = set()
        self._rows: dict[tuple[LogitsOf, int], int] = {}  # rows of logits delivered so far
        self.submitted = False  # whether the current engine has it
        self.restarts = 0  # engine restarts in a row without an event between them
        self.failed = False
        self.sent = False  # whether any engine has had it: from then on each submission is a continuation
        self.phase: Phase = "running"
        self.wanted = True  # whether its reader wants events: False from a pause until the reader asks for more
        self._parked: set[int] = set()  # sequences that the engine has ended because of the pause
        self._cached: dict[int, int] = {}  # prompt tokens that the first attempt found in the cache
        self._drafts: dict[int, DraftCounts] = {}  # of all earlier attempts
        self._own_drafts: dict[int, DraftCounts] = {}  # of the current attempt

    @property
    def done(self) -> bool:
        return self.failed or not self.open

    def move(self, phase: Phase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} → {phase}"
        self.phase = phase
        self._parked.clear()

    def deliver(self, event: Event) -> bool:
        """Pass on one event of the current attempt, with the request's own sequence number.

        Return True if the event was handled at once, so that the caller need not check the request's state.
        """
        self.restarts = 0
        if type(event) is not Tokens:
            self._deliver_other(event)
        elif self._sole is None or event.num_cached_tokens is not None or event.drafts is not None or not self.open:
            self._deliver_tokens(event)
        else:  # nearly all events
            self._sole.extend(event.token_ids)
            return self.sink.put(event) is True and self.phase == "running"
        return False

    def _deliver_other(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.failed = True
            self.sink.put(event)
            return
        index = self.attempt[event.index]
        if index not in self.open or (isinstance(event, PromptScored) and index in self.scored):
            return
        if isinstance(event, PromptScored):
            self.scored.add(index)
        elif isinstance(event, Logits):
            new = self._new_rows(index, event)
            if new is None:
                return
            event = new
        elif isinstance(event, Finished):
            if event.drafts is not None:
                self._own_drafts[index] = event.drafts
            self._settle_drafts(index)
            event = msgspec.structs.replace(
                event,
                num_cached_tokens=self._cached.setdefault(index, event.num_cached_tokens),
                drafts=self._drafts.get(index),
            )
            if self._is_pause(index, event):
                self._park(index)
                return
            self.open.discard(index)
        elif not isinstance(event, Timed):
            self.open.discard(index)
        self.sink.put(event if event.index == index else msgspec.structs.replace(event, index=index))
        self._park(None)

    def _deliver_tokens(self, event: Tokens) -> None:
        index = self.attempt[event.index]
        if index not in self.open:
            return
        if event.num_cached_tokens is not None:
            self._cached.setdefault(index, event.num_cached_tokens)
            if self.delivered[index]:  # only the first attempt reports it
                event = msgspec.structs.replace(event, num_cached_tokens=None)
        if event.drafts is not None:
            self._own_drafts[index] = event.drafts
        self.delivered[index].extend(event.token_ids)
        self.sink.put(event if event.index == index else msgspec.structs.replace(event, index=index))
        if self.phase == "pausing":
            self._park(None)

    def _settle_drafts(self, index: int) -> None:
        """Add up the draft counts of a sequence whose attempt has ended, by itself or with its engine."""
        counts = self._own_drafts.pop(index, None)
        if counts is not None:
            self._drafts[index] = self._drafts.get(index, DraftCounts()) + counts

    def _new_rows(self, index: int, event: Logits) -> Logits | None:
        """Return ``event`` without the rows that an earlier attempt has delivered, or None if no rows are left."""
        end = event.start + event.num_rows
        known = max(self._rows.get((event.of, index), 0) - event.start, 0)
        if known >= event.num_rows:
            return None
        self._rows[event.of, index] = end
        if not known:
            return event
        data = event.data[len(event.data) // event.num_rows * known :]
        return msgspec.structs.replace(event, start=event.start + known, num_rows=event.num_rows - known, data=data)

    def _is_pause(self, index: int, event: Finished) -> bool:
        return self.phase == "pausing" and event.reason == "abort" and index not in self.ending

    def _park(self, index: int | None) -> None:
        """Mark sequence ``index`` as ended, and become "paused" when the engine has no sequence of the request left."""
        if index is not None:
            self._parked.add(index)
        if self.phase == "pausing" and self.open and self._parked >= self.open:
            self.move("paused")

    @property
    def should_pause(self) -> bool:
        """Whether the request has to pause because its reader is too slow.

        The sink is checked again after ``paused`` is set, since a reader that has just emptied it did not see the flag.
        """
        if self.phase != "running" or not self.sink.is_full or self.request.task in POOLED:
            return False
        self.sink.paused = True
        if self.sink.is_drained:
            self.sink.paused = False
            return False
        return True

    def fail(self, error: ServingError) -> None:
        if not self.done:
            self.failed = True
            self.sink.put(Failed(error.kind, error.message, error.param, error.retry_after))

    def continuation(self, max_tokens: int) -> ValidRequest | None:
        """Return a request for what still has to run, or None if nothing does.

        Each sequence resumes after its delivered tokens. ``max_tokens`` is the engine's limit on the length of a
        sequence, prompt and completion (``max_kv_tokens``). A sequence whose last delivered token was its end, and of
        which only the ``Finished`` was lost, is finished here.
        """
        for index in sorted(self.open):
            self._settle_drafts(index)
            reason = self._reason(index, max_tokens)
            if reason is not None:
                self.open.discard(index)
                num_generated = len(self.request.sequences[index].resumed_token_ids) + len(self.delivered[index])
                drafts = self._drafts.get(index)
                self.sink.put(Finished(index, reason, self._cached.get(index, 0), num_generated, drafts=drafts))
        if not self.open:
            return None
        self.attempt = self._to_resume()
        sequences = tuple(self._resumed(index) for index in self.attempt)
        n = self.request.n if self._searches or len(sequences) == len(self.request.sequences) else 1
        seconds = tuple(self.request.second_from[index] for index in self.attempt) if self.request.second_from else ()
        return msgspec.structs.replace(self.request, sequences=sequences, n=n, second_from=seconds)

    @property
    def _searches(self) -> bool:
        return self.request.sampling is not None and self.request.sampling.beams is not None

    def _to_resume(self) -> list[int]:
        """Return the sequences of the next attempt.

        Usually these are the open ones, since no sequence depends on another's tokens. The sequences of a beam search
        depend on each other, so all sequences of a prompt are searched for again while one of them is open.
        """
        if not self._searches:
            return sorted(self.open)
        n = self.request.n
        return [index for index in range(len(self.request.sequences)) if any(i // n == index // n for i in self.open)]

    def _resumed(self, index: int) -> msgspec.Struct:
        source = self.request.sequences[index]
        first = self._next_row(index)
        if self._searches:  # a beam search delivers no tokens before its results are complete
            return msgspec.structs.replace(source, context_logits_from=first)
        resumed = source.resumed_token_ids + tuple(self.delivered[index])
        return msgspec.structs.replace(source, resumed_token_ids=resumed, context_logits_from=first)

    def _next_row(self, index: int) -> int:
        """Return the first row of the context's logits that still has to be delivered."""
        return max(self._rows.get(("context", index), 0), self.request.sequences[index].context_logits_from)

    def _was_read(self, index: int, sampling: Sampling) -> bool:
        """Return whether anything about the prompt was asked for, and all of it was delivered."""
        if sampling.context_logits and self._next_row(index) < len(self.request.sequences[index].prompt_token_ids):
            return False
        return index in self.scored or (sampling.context_logits and sampling.prompt_logprobs is None)

    def _reason(self, index: int, max_tokens: int) -> FinishReason | None:
        sampling, delivered = self.request.sampling, self.delivered[index]
        if index in self.ending:
            return "abort"
        if sampling is None or not (delivered or self._was_read(index, sampling)):
            return None
        source = self.request.sequences[index]
        rule = StopRule(sampling, max_tokens - len(source.prompt_token_ids))
        last = delivered[-1] if delivered else None
        count = len(source.resumed_token_ids) + len(delivered)
        if delivered and rule.has_runs and rule.run_ending((*source.resumed_token_ids, *delivered), count):
            return "stop"
        return rule.reason(last, count)

    @property
    def was_delivered(self) -> bool:
        """Whether the caller has received any token, so that another attempt has to resume."""
        return any(self.delivered)
