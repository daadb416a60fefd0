"""One in-flight request of a client: what was delivered, and what to submit when the engine has to start over."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from ...errors import ServingError
from ...events import DraftCounts, Event, Failed, Finished, FinishReason, Logits, PromptScored, Timed, Tokens
from ...request import POOLED, LogitsOf, Sampling, ValidRequest
from ...stop_rule import StopRule

Phase = Literal["running", "pausing", "paused"]

# "pausing": the engine was asked to end the sequences, and what it had under way still comes. A paused request has
# nothing in the engine, where its place is another's; it is submitted again as a continuation.
MOVES: dict[Phase, tuple[Phase, ...]] = {
    "running": ("pausing", "paused"),
    "pausing": ("paused",),
    "paused": ("running",),
}


class EventSink(Protocol):
    """Where a request's events go. Called on the client's own thread; must not block.

    ``put`` returns True where an event was taken at once and waits for no reader. ``is_full`` asks for a pause, of
    which the reader learns by ``paused``; ``is_drained`` takes it back.
    """

    paused: bool

    def put(self, event: Event, /) -> bool | None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def is_drained(self) -> bool: ...


class InflightRequest:
    """A request, the tokens delivered so far and its place in the engine.

    ``attempt`` maps the sequence numbers of the submission now running to the request's own. A step may give a sequence
    any number of tokens.
    """

    # a step touches one of each stream: what is small stays in the caches
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
        self._rows: dict[tuple[LogitsOf, int], int] = {}  # of logits, delivered so far
        self.submitted = False  # to the engine that there is now
        self.restarts = 0  # in a row, with nothing delivered between them
        self.failed = False
        self.sent = False  # to an engine: from then on what is submitted is a continuation
        self.phase: Phase = "running"
        self.wanted = True  # by its reader: False from a pause until the reader asks for more
        self._parked: set[int] = set()  # sequences whose end for the pause's sake the engine has confirmed
        self._cached: dict[int, int] = {}  # prompt tokens found in the cache by the first attempt
        self._drafts: dict[int, DraftCounts] = {}  # of all attempts before
        self._own_drafts: dict[int, DraftCounts] = {}  # of the attempt now running

    @property
    def done(self) -> bool:
        return self.failed or not self.open

    def move(self, phase: Phase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} → {phase}"
        self.phase = phase
        self._parked.clear()

    def deliver(self, event: Event) -> bool:
        """Hand on one event of the running attempt, under the request's own numbering. Whether it was taken at once, so
        that nothing about the request is to be looked at."""
        self.restarts = 0
        if type(event) is not Tokens:
            self._deliver_other(event)
        elif self._sole is None or event.num_cached_tokens is not None or event.drafts is not None or not self.open:
            self._deliver_tokens(event)
        else:  # nearly all
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
            if self.delivered[index]:  # the first of a later attempt only
                event = msgspec.structs.replace(event, num_cached_tokens=None)
        if event.drafts is not None:
            self._own_drafts[index] = event.drafts
        self.delivered[index].extend(event.token_ids)
        self.sink.put(event if event.index == index else msgspec.structs.replace(event, index=index))
        if self.phase == "pausing":
            self._park(None)

    def _settle_drafts(self, index: int) -> None:
        """Those of a sequence whose attempt has come to an end, its own or its engine's."""
        counts = self._own_drafts.pop(index, None)
        if counts is not None:
            self._drafts[index] = self._drafts.get(index, DraftCounts()) + counts

    def _new_rows(self, index: int, event: Logits) -> Logits | None:
        """``event`` without the rows that an earlier attempt has delivered; None where it has no others."""
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
        """Paused when the engine has nothing of the request any more."""
        if index is not None:
            self._parked.add(index)
        if self.phase == "pausing" and self.open and self._parked >= self.open:
            self.move("paused")

    @property
    def should_pause(self) -> bool:
        """Whether the reader is too slow. The sink is asked again after ``paused`` is set: a reader that has just
        emptied it did not see that."""
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
        """What is still to run, each sequence resumed after its delivered tokens; None when nothing is.

        ``max_tokens``: the engine takes no sequence longer than that, prompt and completion (``max_kv_tokens``).
        A sequence whose last delivered token was its end (only the word of it was lost) is finished here.
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
        """Sequences of the next attempt: each open one by itself, since none depends on another's tokens. The texts of
        a beam search come together, so that all of a prompt's are searched for again while one of them is open."""
        if not self._searches:
            return sorted(self.open)
        n = self.request.n
        return [index for index in range(len(self.request.sequences)) if any(i // n == index // n for i in self.open)]

    def _resumed(self, index: int) -> msgspec.Struct:
        source = self.request.sequences[index]
        first = self._next_row(index)
        if self._searches:  # a search has no tokens before it has its texts
            return msgspec.structs.replace(source, context_logits_from=first)
        resumed = source.resumed_token_ids + tuple(self.delivered[index])
        return msgspec.structs.replace(source, resumed_token_ids=resumed, context_logits_from=first)

    def _next_row(self, index: int) -> int:
        """The first row of the context's logits that is still wanted."""
        return max(self._rows.get(("context", index), 0), self.request.sequences[index].context_logits_from)

    def _was_read(self, index: int, sampling: Sampling) -> bool:
        """Whether everything that was asked of its prompt was delivered, and anything was asked."""
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
        """Whether the caller has any token of it, so that another attempt has to resume."""
        return any(self.delivered)
