"""One request as its client sees it run: what was delivered, and what to submit when the engine has to start over."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..events import Embedded, Event, Failed, Finished, FinishReason, PromptScored, Tokens
from ..request import ValidRequest


class Sink(Protocol):
    """Where a request's events go. Called on the client's own thread; must not block."""

    def put(self, event: Event) -> None: ...


class RunningRequest:
    """``attempt`` maps the sequence numbers of the submission now running to the request's own."""

    def __init__(self, request: ValidRequest, wire_id: str, sink: Sink) -> None:
        self.request, self.wire_id, self.sink = request, wire_id, sink
        self.delivered: list[list[int]] = [[] for _ in request.sequences]
        self.open = set(range(len(request.sequences)))
        self.attempt = list(range(len(request.sequences)))
        self.ending: set[int] = set()  # sequences the caller has asked to end
        self.scored: set[int] = set()
        self.restarts = 0  # in a row, with nothing delivered between them
        self.failed = False

    @property
    def done(self) -> bool:
        return self.failed or not self.open

    def deliver(self, event: Event) -> None:
        """Hand on one event of the running attempt, under the request's own numbering."""
        self.restarts = 0
        if isinstance(event, Failed):
            self.failed = True
            self.sink.put(event)
            return
        index = self.attempt[event.index]
        if index not in self.open or (isinstance(event, PromptScored) and index in self.scored):
            return
        if isinstance(event, Tokens):
            self.delivered[index].extend(event.token_ids)
        elif isinstance(event, PromptScored):
            self.scored.add(index)
        else:
            self.open.discard(index)
        self.sink.put(event if event.index == index else msgspec.structs.replace(event, index=index))

    def fail(self, kind: str, message: str) -> None:
        if not self.done:
            self.failed = True
            self.sink.put(Failed(kind, message))

    def continuation(self, max_model_len: int) -> ValidRequest | None:
        """What is still to run, each sequence resumed behind its delivered tokens; None when nothing is.

        A sequence whose last delivered token was its end (only the word of it was lost) is finished here.
        """
        for index in sorted(self.open):
            reason = self._reason(index, max_model_len)
            if reason is not None:
                self.open.discard(index)
                num_generated = len(self.request.sequences[index].resumed_token_ids) + len(self.delivered[index])
                self.sink.put(Finished(index, reason, 0, num_generated))
        if not self.open:
            return None
        self.attempt = sorted(self.open)
        sequences = tuple(self._resumed(index) for index in self.attempt)
        n = self.request.n if len(sequences) == len(self.request.sequences) else 1
        return msgspec.structs.replace(self.request, request_id=self.wire_id, sequences=sequences, n=n)

    def _resumed(self, index: int) -> msgspec.Struct:
        source = self.request.sequences[index]
        resumed = source.resumed_token_ids + tuple(self.delivered[index])
        return msgspec.structs.replace(source, resumed_token_ids=resumed)

    def _reason(self, index: int, max_model_len: int) -> FinishReason | None:
        sampling, delivered = self.request.sampling, self.delivered[index]
        if index in self.ending:
            return "abort"
        if sampling is None or not delivered:
            return None
        source = self.request.sequences[index]
        num_generated = len(source.resumed_token_ids) + len(delivered)
        if num_generated >= sampling.min_tokens and delivered[-1] in sampling.stop_token_ids:
            return "stop"
        full = num_generated >= sampling.max_tokens or len(source.prompt_token_ids) + num_generated >= max_model_len
        return "length" if full else None


def is_terminal(event: Event) -> bool:
    """Whether ``event`` ends a sequence (``Failed`` ends the whole request)."""
    return isinstance(event, Finished | Embedded | Failed)
