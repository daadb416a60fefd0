"""The requests an engine has taken on, and what there is to tell of them. Both exits of a request are here."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from ..errors import ServingError
from ..events import Event, Failed, Finished, FinishReason, TokenLogprob, Tokens
from ..request import ValidRequest
from .sequence import SequenceState

Client = Hashable
EngineOutput = tuple[Client, str, Event]


@dataclass(slots=True)
class InflightRequest:
    """A request the engine has taken on, and its sequences that still run."""

    request: ValidRequest
    client: Client
    unfinished: dict[int, SequenceState] = field(default_factory=dict)


class InflightRequests:
    """Keyed by request id. Events gather until ``drain``, in the order they were told."""

    def __init__(self) -> None:
        self._inflight: dict[str, InflightRequest] = {}
        self._told: list[EngineOutput] = []

    def __len__(self) -> int:
        return len(self._inflight)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inflight

    def __iter__(self) -> Iterator[InflightRequest]:
        """Those open now: entries may leave while they are gone through."""
        return iter(list(self._inflight.values()))

    @property
    def has_news(self) -> bool:
        return bool(self._told)

    def get(self, request_id: str) -> InflightRequest | None:
        return self._inflight.get(request_id)

    def ahead_of(self, request: ValidRequest) -> int:
        """Requests that it would have to share with: a provisioned one waits for no others."""
        if not request.provisioned:
            return len(self._inflight)
        return sum(entry.request.provisioned for entry in self._inflight.values())

    def of(self, sequence: SequenceState) -> InflightRequest:
        return self._inflight[sequence.request.request_id]

    def add(self, request: ValidRequest, client: Client) -> InflightRequest:
        entry = self._inflight[request.request_id] = InflightRequest(request, client)
        return entry

    def refuse(self, request: ValidRequest, client: Client, error: ServingError) -> None:
        """Tell why a request was not taken on."""
        self._told.append((client, request.request_id, _failed(error)))

    def tell(self, entry: InflightRequest, event: Event) -> None:
        self._told.append((entry.client, entry.request.request_id, event))

    def tell_held(self, sequence: SequenceState) -> None:
        """Tell the tokens that were held back, in one event."""
        held, sequence.held = sequence.held, []
        if held:
            token_ids = tuple(result.token_id for result in held)
            logprobs: tuple[TokenLogprob, ...] = tuple(r.logprob for r in held if r.logprob is not None)
            first = sequence.num_generated - len(held) == sequence.num_resumed
            cached = sequence.num_cached if first else None
            self.tell(self.of(sequence), Tokens(sequence.index, token_ids, logprobs, cached))

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """The end of one sequence, and of its request where it was the last."""
        self.tell_held(sequence)
        started = sequence.first_step_at or time.monotonic()
        finished = Finished(
            sequence.index,
            reason,
            num_cached_tokens=sequence.num_cached,
            num_generated_tokens=sequence.num_generated,
            queue_time=started - sequence.arrived_at,
        )
        entry = self.of(sequence)
        self.tell(entry, finished)
        del entry.unfinished[sequence.index]
        if not entry.unfinished:
            self.leave(entry)

    def fail(self, entry: InflightRequest, error: ServingError) -> None:
        """The end of a whole request that cannot go on."""
        entry.unfinished.clear()
        self.leave(entry)
        self.tell(entry, _failed(error))

    def leave(self, entry: InflightRequest) -> None:
        del self._inflight[entry.request.request_id]

    def drain(self) -> list[EngineOutput]:
        told, self._told = self._told, []
        return told


def _failed(error: ServingError) -> Failed:
    return Failed(error.kind, error.message, error.param, error.retry_after)
