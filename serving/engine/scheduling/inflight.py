"""The requests that an engine has accepted, and the events it owes their clients. Requests finish or fail here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...interface.engine import QUEUE_FLOOR, Client, EngineOutput
from ...interface.errors import Overloaded, ServingError
from ...interface.events import Event, Failed, Finished, FinishReason, Logits, Timed, TokenLogprob, Tokens
from ...interface.request import LogitsOf, ValidRequest
from .prerequisites import Prerequisites
from .sequence import SequenceGroup, SequenceState

LOGITS_EVENT_BYTES = 2**20  # approximate size of an event in bytes


@dataclass(frozen=True, slots=True)
class SearchedText:
    """The result of a beam search for sequence ``index`` of the request."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    logits: tuple[Any, ...] = ()  # [V] for each token, if they are wanted


@dataclass(slots=True)
class InflightRequest:
    """A request that the engine has accepted, with a group for each of its prompts, or none for embeddings."""

    request: ValidRequest
    client: Client
    adapter: str = ""  # the key that it claims (``AdapterRegistry``)
    has_table: bool = False  # whether it has a table of virtual tokens
    groups: list[SequenceGroup] = field(default_factory=list)
    prerequisites: Prerequisites = field(default_factory=Prerequisites)

    @property
    def unfinished(self) -> list[SequenceState]:
        """The sequences that still run or wait."""
        return [sequence for group in self.groups for sequence in group.members]

    def find(self, index: int) -> SequenceState | None:
        """Return the unfinished sequence ``index`` unless it is a beam; None if there is none."""
        found = (sequence for sequence in self.unfinished if sequence.index == index and sequence.group.beams is None)
        return next(found, None)


class InflightRequests:
    """The requests in flight, by request id. Events are collected, in order, until ``drain``. ``on_end`` is called with
    each request that ends."""

    def __init__(self, on_end: Callable[[InflightRequest], None]) -> None:
        self._on_end = on_end
        self._by_id: dict[str, InflightRequest] = {}
        self._of_tenant: Counter[str] = Counter()
        self._outputs: list[EngineOutput] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[InflightRequest]:
        """Iterate over the requests in flight now; they may be removed during the iteration."""
        return iter(list(self._by_id.values()))

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def get(self, request_id: str) -> InflightRequest | None:
        """Return the request with that id; None if it is not in flight."""
        return self._by_id.get(request_id)

    def check_room(self, request: ValidRequest, maximum: int) -> None:
        """Raise ``Overloaded`` if ``maximum`` requests are already in flight.

        A provisioned request counts only other provisioned ones, since it waits for no others. A tenant with fewer than
        ``maximum // QUEUE_FLOOR`` requests is admitted even then, as long as there are fewer than twice ``maximum``, so
        that nobody is refused because of another tenant's backlog."""
        ahead = len(self._by_id)
        if request.provisioned:
            ahead = sum(one.request.provisioned for one in self._by_id.values())
        check_queue(ahead, self._of_tenant[request.tenant], maximum)

    def of(self, sequence: SequenceState) -> InflightRequest:
        """Return the request that ``sequence`` belongs to. Raises ``KeyError`` if it has ended."""
        return self._by_id[sequence.request.request_id]

    def add(self, request: ValidRequest, client: Client, adapter: str) -> InflightRequest:
        """Accept ``request``, whose id must not be in flight and which claims ``adapter``. The caller makes its
        groups."""
        inflight = self._by_id[request.request_id] = InflightRequest(request, client, adapter)
        self._of_tenant[request.tenant] += 1
        return inflight

    def refuse(self, request: ValidRequest, client: Client, error: ServingError) -> None:
        """Emit ``Failed`` for a request that was not accepted."""
        self._outputs.append((client, request.request_id, failed(error)))

    def emit(self, inflight: InflightRequest, event: Event) -> None:
        """Add ``event``, for the request's client, to what the next ``drain`` returns."""
        self._outputs.append((inflight.client, inflight.request.request_id, event))

    def flush(self, sequence: SequenceState) -> None:
        """Emit the tokens that were held back, in one event."""
        unsent, sequence.unsent = sequence.unsent, []
        if unsent:
            if sequence.timings:
                steps, sequence.timings = tuple(sequence.timings), []
                self.emit(self.of(sequence), Timed(sequence.index, steps))
            token_ids = tuple(one.token_id for one in unsent)
            logprobs: tuple[TokenLogprob, ...] = tuple(one.logprob for one in unsent if one.logprob is not None)
            is_first = sequence.num_generated - len(unsent) == sequence.num_resumed
            cached = sequence.num_cached if is_first else None
            counted = sequence.drafted
            drafts = counted.counts if counted is not None and counted.counts.proposed else None
            self.emit(self.of(sequence), Tokens(sequence.index, token_ids, logprobs, cached, drafts))

    def emit_logits(
        self, sequence: SequenceState, of: LogitsOf, start: int, rows: Any, index: int | None = None
    ) -> None:
        """Emit ``rows`` [n, V], of which the first is row ``start``, in events of about ``LOGITS_EVENT_BYTES`` bytes.

        ``index`` is given if it is not the sequence's own."""
        inflight, index = self.of(sequence), sequence.index if index is None else index
        each = max(LOGITS_EVENT_BYTES // (4 * rows.shape[-1]), 1)
        for first in range(0, len(rows), each):
            part = rows[first : first + each]
            data = np.asarray(part.float().cpu(), dtype="<f4").tobytes()
            self.emit(inflight, Logits(index, of, start + first, len(part), data))

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """End one sequence, and its request if it was the last."""
        self.flush(sequence)
        started = sequence.first_step_at or time.monotonic()
        finished = Finished(
            sequence.index,
            reason,
            num_cached_tokens=sequence.num_cached,
            num_generated_tokens=sequence.num_generated,
            queue_time=started - sequence.arrived_at,
            drafts=None if sequence.drafted is None else sequence.drafted.counts,
        )
        inflight = self.of(sequence)
        self.emit(inflight, finished)
        sequence.group.members.remove(sequence)
        if not inflight.unfinished:
            self.remove(inflight)

    def finish_search(self, group: SequenceGroup, texts: Sequence[SearchedText]) -> None:
        """End a search, and its request if it was the last."""
        inflight = self.of(group.members[0])
        self.send_texts(group.members[0], texts)
        group.members.clear()
        if not inflight.unfinished:
            self.remove(inflight)

    def send_texts(self, first: SequenceState, texts: Sequence[SearchedText]) -> None:
        """Emit texts of a search, each complete and in one event. ``first`` is the search's first beam."""
        inflight = self.of(first)
        started = first.first_step_at or time.monotonic()
        for text in texts:
            if text.logits:
                self.emit_logits(first, "generation", 0, torch.stack(text.logits), text.index)
            if text.token_ids:
                self.emit(inflight, Tokens(text.index, text.token_ids, text.logprobs, first.num_cached))
            finished = Finished(
                text.index,
                text.reason,
                num_cached_tokens=first.num_cached,
                num_generated_tokens=len(text.token_ids),
                queue_time=started - first.arrived_at,
            )
            self.emit(inflight, finished)

    def fail(self, inflight: InflightRequest, error: ServingError) -> None:
        """End a whole request that cannot go on."""
        inflight.groups.clear()
        self.remove(inflight)
        self.emit(inflight, failed(error))

    def remove(self, inflight: InflightRequest) -> None:
        """Forget a request that has ended."""
        del self._by_id[inflight.request.request_id]
        tenant = inflight.request.tenant
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._on_end(inflight)

    def drain(self) -> list[EngineOutput]:
        """Return everything emitted since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs


def check_queue(ahead: int, of_tenant: int, maximum: int) -> None:
    """Raise ``Overloaded`` if there is no room behind ``ahead`` requests, ``of_tenant`` of them of its own tenant."""
    if ahead >= maximum and (ahead >= 2 * maximum or of_tenant >= maximum // QUEUE_FLOOR):
        raise Overloaded(f"{ahead} requests are queued already", retry_after=1.0)


def failed(error: ServingError) -> Failed:
    """Return the event that ends a request with an error."""
    return Failed(error.kind, error.message, error.param, error.retry_after)
