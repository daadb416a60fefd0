"""A lease: an admitted request's reservation and usage, and the single way in which it is settled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from ...interface.errors import Aborted
from ...interface.labels import NONE, Labels
from ...model_files.model_version import UNKNOWN, ModelVersion
from ..accounts.limits import Limit, LimitStatus
from ..accounts.money import FREE, Price
from ..proof.answers import Asked, Said
from .count_audit import BILLED_BELOW_RECEIVED, CountAudit
from .lease_owner import LeaseOwner
from .settlement import Settlement, Status


class Bucket(Struct, frozen=True, kw_only=True):
    """The token bucket of provisioned throughput: ``rate`` tokens/s, with bursts of up to ``burst_seconds``.

    A prompt token costs ``prompt_weight_milli`` thousandths of a generated one, since it is cheaper to compute.
    """

    rate: int
    burst_seconds: int = 60
    prompt_weight_milli: int = 1000


class Reservation(Struct, frozen=True, kw_only=True):
    """The most that a request may use. ``max_output_tokens`` is the sum over its sequences.

    ``pays_tokens`` is False if provisioned time is billed instead, so that tokens cost nothing extra. ``request_id`` is
    the server's own, unique for ever (1 to 256 bytes), and not an id chosen by callers. ``background`` requests have
    the prices of batches. ``model`` is the one that
    answers, ``labels`` is what the caller says about the request, ``asked`` is kept to repeat and prove the answer.
    ``adapter_hash`` is the hash of its adapter's content, "" for one that came with the model.
    ``limited_user`` is the end user whose limits apply: as the caller says, if it may name end users.
    """

    request_id: str
    key_id: str
    tenant: str
    endpoint: str
    entity: str
    mode: str
    task: str
    input_tokens: int
    max_output_tokens: int
    adapter: str | None = None
    adapter_hash: str = ""
    bucket: Bucket | None = None
    pays_tokens: bool = True
    background: bool = False
    model: ModelVersion = UNKNOWN
    labels: Labels = NONE
    limited_user: str = ""
    asked: Asked | None = None


class Began(Struct, frozen=True):
    """The start of a request: by the wall clock, for its timestamp, and by a monotonic clock, for durations."""

    wall_ms: int
    monotonic: float


class LeaseCloser(Protocol):
    """The part of a ledger that a lease needs: a clock, and a way to be settled."""

    @property
    def monotonic(self) -> Callable[[], float]: ...
    @property
    def audit(self) -> CountAudit: ...
    def close_lease(self, lease: Lease, owner: LeaseOwner, slot: int, settlement: Settlement) -> None: ...
    def drop_lease(self, lease: Lease, owner: LeaseOwner, slot: int) -> None: ...


class Lease:
    """The open ledger row of a running request. Thread-safe.

    It is a context manager: leaving the block always settles. ``slot`` is reserved for it in the owner's progress file.
    ``limits`` has, for each kind, the strictest limit right after the admission (for ``x-ratelimit-*`` headers).
    ``within_reserve`` says that the reservation's bucket had room (True without a bucket). ``beyond`` are the soft
    limits that it goes beyond. ``price`` is its row's.
    ``proof_key`` is the key of the request's hashes, None if its answer is not hashed.
    """

    def __init__(
        self,
        ledger: LeaseCloser,
        owner: LeaseOwner,
        reservation: Reservation,
        *,
        slot: int,
        began: Began,
        limits: tuple[LimitStatus, ...],
        within_reserve: bool,
        beyond: tuple[Limit, ...] = (),
        price: Price = FREE,
        proof_key: bytes | None = None,
    ) -> None:
        self.reservation = reservation
        self.began = began
        self.limits = limits
        self.within_reserve = within_reserve
        self.beyond = beyond
        self.price = price
        self.proof_key = proof_key
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._ledger = ledger
        self._owner = owner
        self._slot = slot
        owner.progress.begin(slot, reservation.request_id)
        self._lock = threading.Lock()
        self._settled = False
        self._held = False
        self.settlement: Settlement | None = None  # of a lease that is held

    @property
    def request_id(self) -> str:
        return self.reservation.request_id

    @property
    def settled(self) -> bool:
        return self._settled

    def hold(self) -> None:
        """Leave the settlement to the caller: it is kept in ``settlement``, for the transaction that stores the reply.

        Nothing is counted before: if this process ends first, nothing is billed. ``drop`` must be called in the end.
        """
        self._held = True

    def drop(self) -> None:
        """Forget a lease that was held. If its row is still open, upkeep closes it with nothing billed."""
        self._ledger.drop_lease(self, self._owner, self._slot)

    def count(self, completion_tokens: int = 0, *, prompt: int | None = None, cached: int | None = None) -> None:
        """Add generated tokens; call this before sending them on. ``prompt`` and ``cached`` replace earlier counts.

        The first call says that the request has run: from then on its prompt (all reserved input tokens, unless
        ``prompt`` says otherwise) is billed however the request ends. Counts survive ``kill -9``. After ``settle`` this
        has no effect.
        """
        if completion_tokens < 0 or (prompt or 0) < 0 or (cached or 0) < 0:
            raise ValueError("token counts are never negative")
        with self._lock:
            if self._settled or self._held:
                return
            if prompt is not None:
                self.prompt_tokens = prompt
            elif not self.prompt_tokens:
                self.prompt_tokens = self.reservation.input_tokens
            if cached is not None:
                self.cached_tokens = min(cached, self.prompt_tokens)
            self.completion_tokens += completion_tokens
            self._owner.progress.put(self._slot, self.prompt_tokens, self.cached_tokens, self.completion_tokens)

    def settle(
        self,
        *,
        prompt: int | None = None,
        cached: int | None = None,
        completion: int | None = None,
        finish_reason: str | None = None,
        status: Literal["ok", "error", "aborted"] = "ok",
        drafts: tuple[int, int] = (0, 0),
        said: list[Said] | None = None,
    ) -> None:
        """Close the row with exact token counts; None uses the count so far. Only the first call has an effect.

        ``drafts`` are the numbers of tokens drafted and accepted, which are recorded but cost nothing. ``said`` are the
        hashes of a whole answer. A successful
        request bills its prompt even if nothing was counted (embeddings). Store failures are never raised: a settlement
        that the store cannot take is spooled.
        """
        with self._lock:
            if self._settled:
                return
            settlement = self._settlement(prompt, cached, completion, finish_reason, status, drafts, said)
            self._settled = True
            if self._held:
                self.settlement = settlement
                return
        self._ledger.close_lease(self, self._owner, self._slot, settlement)

    def _settlement(
        self,
        prompt: int | None,
        cached: int | None,
        completion: int | None,
        finish_reason: str | None,
        status: Status,
        drafts: tuple[int, int],
        said: list[Said] | None,
    ) -> Settlement:
        if prompt is None:
            prompt = self.prompt_tokens or (self.reservation.input_tokens if status == "ok" else 0)
        completion = self.completion_tokens if completion is None else self._at_least_received(completion)
        cached = min(self.cached_tokens if cached is None else cached, prompt)
        if prompt < 0 or completion < 0 or cached < 0 or min(drafts) < 0:
            raise ValueError("token counts are never negative")
        return Settlement(
            request_id=self.request_id,
            prompt=prompt,
            cached=cached,
            completion=completion,
            finish_reason=finish_reason,
            status=status,
            ended_ms=self.began.wall_ms + int((self._ledger.monotonic() - self.began.monotonic) * 1000),
            drafts=drafts[0],
            accepted_drafts=drafts[1],
            output=None if said is None else msgspec.json.encode(said).decode(),
        )

    def _at_least_received(self, completion: int) -> int:
        """Return what is billed of ``completion`` tokens: never fewer than were counted before they were sent on."""
        if completion < self.completion_tokens:
            text = f"{self.completion_tokens} tokens were sent, {completion} were to be billed; all of them are"
            self._ledger.audit.violated(BILLED_BELOW_RECEIVED, self.request_id, text)
        return max(completion, self.completion_tokens)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.settle()
        elif issubclass(kind, Exception) and not issubclass(kind, Aborted | ConnectionError):
            self.settle(finish_reason="error", status="error")
        else:  # GeneratorExit, GreenletExit or a closed socket: the caller went away
            self.settle(finish_reason="abort", status="aborted")
