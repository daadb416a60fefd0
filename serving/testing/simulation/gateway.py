"""The programs of simulated processes: a gateway with its upkeep, its requests, and the engine that it asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from greenlet import GreenletExit

from ...interface.errors import Aborted, LimitExceeded, PermissionDenied, RequestError, Unavailable
from ...metering.ledger.lease import Bucket, Lease, Reservation
from ...metering.ledger.ledger import Ledger
from ...metering.store.store import Store
from ...system.journal import Journal, JournalEntry
from .hosts import Host, Process
from .scheduler import Killed, Scheduler

UPKEEP_SECONDS = 12.0
MAX_CLOCK_SKEW = 60.0


@dataclass(slots=True)
class Request:
    """A request as those outside of the ledger see it.

    ``generated`` is what engines made, ``counted`` what the gateway got of it, ``received`` what the client got.
    ``outcome`` is "asked" until the admission has an answer: "refused", "failed" or "admitted"; ``status`` is what it
    was to be settled with, and ``settled`` says that the settlement has returned.
    """

    request_id: str
    host: Host
    reservation: Reservation
    generated: int = 0
    counted: int = 0
    received: int = 0
    outcome: str = "asked"
    status: str | None = None
    settled: bool = False
    power_lost: bool = False
    in_memory: bool = False
    """Whether the host's disk took nothing at some time, so that its settlement may have been kept in memory."""
    unsynced: bool = False
    """Whether the host's disk said at some time that it had what a loss of power takes from it."""
    beyond: frozenset[tuple[str, str, str]] = frozenset()
    """The soft limits that it goes beyond, as its admission says: scope, subject, kind."""


class Engine:
    """An engine process with its journal."""

    def __init__(self, process: Process, scheduler: Scheduler, journal: Journal) -> None:
        self.process = process
        self._scheduler = scheduler
        self._journal = journal
        self._entries: dict[str, JournalEntry] = {}

    def generate(self, request: Request, tokens: int) -> None:
        with acting_as(self._scheduler, self.process):
            if request.request_id not in self._entries:
                self._entries[request.request_id] = self._journal.begin(request.request_id)
            self._journal.count(self._entries[request.request_id], tokens)
            request.generated += tokens

    def end(self, request: Request) -> None:
        with acting_as(self._scheduler, self.process):
            if entry := self._entries.pop(request.request_id, None):
                self._journal.end([entry])


@contextlib.contextmanager
def acting_as(scheduler: Scheduler, process: Process) -> Iterator[None]:
    """Let the calling actor do the work of another process, without seams and on a disk with room."""
    actor = scheduler.current
    assert actor is not None
    caller, quiet = actor.process, actor.is_quiet
    actor.process, actor.is_quiet = process, True
    try:
        yield
    finally:
        actor.process, actor.is_quiet = caller, quiet


class Gateway:
    """A gateway process: the ledger of the product over a store of its own."""

    def __init__(self, process: Process, store: Store, scheduler: Scheduler) -> None:
        self.process = process
        self.store = store
        self.ledger: Ledger | None = None
        self.upkeep_seconds = UPKEEP_SECONDS
        self.is_closing = False
        self._is_busy = False
        self._scheduler = scheduler

    def run(self) -> None:
        """Start, and do upkeep until the process ends. A start that finds no database is tried again."""
        host = self.process.host
        while self.ledger is None:
            try:
                self.ledger = Ledger(
                    self.store,
                    state_dir=host.state,
                    clock=host.wall,
                    monotonic=host.since_boot,
                    max_clock_skew=MAX_CLOCK_SKEW,
                )
            except Unavailable:
                self._scheduler.sleep(5.0)
        self.ledger.start_lending()
        while not self.is_closing:
            self._is_busy = True
            with contextlib.suppress(Unavailable):
                self.ledger.maintain()
            self._is_busy = False
            self._scheduler.wait(lambda: self.is_closing, self.upkeep_seconds)

    def close(self) -> None:
        """End in order, as at SIGTERM."""
        if self.ledger is not None:
            self.ledger.settle_open()
            self._scheduler.wait(lambda: not self._is_busy, 10.0)  # as ``close`` waits for the thread of ``start``
            self.ledger.close()

    def serve(self, request: Request, engine: Engine, draw: Random) -> None:
        """Serve a request as a worker does. Raises only what no worker expects."""
        assert self.ledger is not None
        try:
            lease = self.ledger.reserve(request.reservation)
        except (LimitExceeded, PermissionDenied):
            request.outcome = "refused"
            return
        except (Unavailable, GreenletExit):
            request.outcome = "failed"
            return
        except RequestError as error:
            if "more than the limit ever allows" not in str(error):
                raise
            request.outcome = "refused"
            return
        request.outcome = "admitted"
        request.beyond = frozenset((limit.scope, limit.subject, limit.kind) for limit in lease.beyond)
        with contextlib.suppress(GreenletExit, Aborted, _Failure):
            try:
                with lease:
                    self._answer(request, lease, engine, draw)
            except BaseException as error:
                request.settled = not isinstance(error, Killed | AssertionError) and not self.is_closing
                raise
            request.settled = not self.is_closing  # else its end may have been settled, by another actor

    def _answer(self, request: Request, lease: Lease, engine: Engine, draw: Random) -> None:
        left = draw.randint(0, request.reservation.max_output_tokens)
        try:
            while left > 0:
                tokens = draw.randint(1, left)
                if not engine.process.is_alive:
                    engine = engine.process.program()
                engine.generate(request, tokens)
                self._scheduler.sleep(draw.expovariate(1.0))
                if not engine.process.is_alive or draw.random() < 0.05:
                    continue  # generated, and lost on the way: they are generated again
                lease.count(tokens)
                if lease.settled:  # the process is closing
                    return
                left, request.counted = left - tokens, request.counted + tokens
                self._scheduler.pause()
                request.received += tokens
                if draw.random() < 0.1:
                    raise Aborted("the client went away")
                if draw.random() < 0.1:
                    raise _Failure
        except (Aborted, GreenletExit):
            request.status = "aborted"
            raise
        except _Failure:
            request.status = "error"
            raise
        finally:
            if engine.process.is_alive and self.process.is_alive:
                engine.end(request)
        request.status = "ok"
        lease.settle(finish_reason="stop")


class _Failure(Exception):
    """A failure of the server's while a request runs."""


def drawn_reservation(request_id: str, draw: Random, bucket: Bucket | None) -> Reservation:
    return Reservation(
        request_id=request_id,
        key_id=f"key_{draw.randrange(2)}",
        tenant="acme" if draw.random() < 0.7 else "initech",
        endpoint="chat",
        entity="model-1",
        mode="pay_per_token" if bucket is None else "provisioned",
        task="chat",
        input_tokens=draw.randint(1, 40),
        max_output_tokens=draw.randint(1, 30),
        bucket=bucket,
        pays_tokens=bucket is None,
    )
