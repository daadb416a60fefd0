"""The runner of batches in a worker: claims rows and answers them like requests that came over HTTP.

Each worker of each server with the same database runs rows, up to ``batch_concurrency`` at once. The engine runs them
in the time that other requests leave (``ValidRequest.background``). A row that is refused for the moment is tried again
until its batch expires; any other refusal is its answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gevent
import msgspec

from ..dialects import DIALECTS
from ..frontend.answer import Answer, error_answer
from ..frontend.invoke import invoke
from ..frontend.operation import Auth, Background, Operation, Request
from ..frontend.streams.in_flight import ClientGone, InterruptibleIterator
from ..frontend.worker_state import WorkerState
from ..interface.errors import (
    Aborted,
    InternalError,
    InvalidField,
    LimitExceeded,
    NotFound,
    ServingError,
    Unauthenticated,
    Unavailable,
)
from ..interface.labels import Labels
from ..metering.accounts.authorization import Caller
from ..metering.accounts.keys import check_tenant
from ..metering.ledger.lease import Lease
from ..metering.ledger.ledger import Ledger
from ..observability.access_record import AccessRecord
from ..system import logs
from .files import Files
from .objects import DONE, FAILED, PENDING, RUNNING
from .rows import ClaimedRow, Rows
from .upkeep import ActiveBatch, Upkeep

POLL_SECONDS = 1.0
CLEAN_SECONDS = 60.0
MAX_RETRY_SECONDS = 60.0
COMING_SECONDS = 5.0  # before another attempt at an endpoint that is not served yet
MAX_CRASHES = 5  # processes that may end while they run a row
MAX_FAULTS = 3  # attempts of a row that may end by a fault of the server
OPERATIONS = {
    route.path: Operation(
        path=route.path, handler=invoke, summary=route.summary, dialect=dialect, auth=Auth.INVOKE, inference=route
    )
    for dialect in (DIALECTS["openai"], DIALECTS["responses"])
    for route in dialect.routes
}


class RunningRow:
    """A row that this worker runs."""

    def __init__(self, batch: ActiveBatch, row: ClaimedRow) -> None:
        self.batch, self.row = batch, row
        self.lease: Lease | None = None
        self._pull: InterruptibleIterator[Any] | None = None
        self._stopped = False

    def admitted(self, lease: Lease) -> None:
        """Note the lease of the row's request."""
        self.lease = lease

    @contextmanager
    def watch(self, pull: InterruptibleIterator[Any]) -> Iterator[None]:
        """Let ``stop`` interrupt the request."""
        outer, self._pull = self._pull, pull
        if self._stopped:
            pull.interrupt(ClientGone())
        try:
            yield
        finally:
            self._pull = outer

    def stop(self) -> None:
        """Interrupt the request; the row is given back."""
        self._stopped = True
        if self._pull is not None:
            self._pull.interrupt(ClientGone())


class BatchRunner:
    """The runner of one worker. ``start`` it on the event loop, ``stop`` it when the worker drains."""

    def __init__(self, server: WorkerState, ledger: Ledger) -> None:
        settings = server.settings
        self._server, self._ledger = server, ledger
        self._rows = Rows(ledger.store)
        self._upkeep = Upkeep(ledger.store, settings.max_batch_rows)
        self._files = Files(ledger.store)
        self._running: dict[tuple[str, int], RunningRow] = {}
        self._validating: set[str] = set()
        self._faults: dict[tuple[str, int], int] = {}
        self._wake = server.batches_changed
        self._stopped = False
        self._loop: Any = None
        self._clean_at = 0

    def start(self) -> None:
        self._loop = gevent.spawn(self._run)

    def stop(self) -> None:
        """Claim no more rows, and interrupt those that run: others answer them."""
        self._stopped = True
        self._wake.set()
        for running in list(self._running.values()):
            running.stop()

    def join(self, seconds: float) -> None:
        """Wait, after ``stop``, until all rows are given back."""
        with gevent.Timeout(seconds, False):
            while self._running or self._validating or not self._loop.ready():
                gevent.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            try:
                self._round()
            except Unavailable:
                pass  # the ledger has logged it
            except Exception:
                logs.event("fault", level=logging.ERROR, exc_info=True, of="batches")
            self._wake.wait(POLL_SECONDS)

    def _round(self) -> None:
        """Do what there is to do for all batches."""
        now_ms = self._ledger.now_ms()
        if now_ms >= self._clean_at:
            self._clean_at = now_ms + int(CLEAN_SECONDS * 1000)
            self._files.remove_old(now_ms)
        found = self._upkeep.active()
        if not found:
            return
        self._rows.free_dead()
        for batch in found:
            if self._stopped:
                return
            self._look_after(batch, now_ms)
        ready = [batch for batch in found if batch.status == "in_progress" and batch.expires_ms > now_ms]
        self._claim(ready, now_ms)

    def _look_after(self, batch: ActiveBatch, now_ms: int) -> None:
        """Validate or end a batch, if it is time for that."""
        if batch.status == "cancelling" or batch.expires_ms <= now_ms:
            for running in [one for one in self._running.values() if one.batch.id == batch.id]:
                running.stop()
            if not self._rows.has(batch.id, RUNNING):
                self._upkeep.end(batch, "cancelled" if batch.status == "cancelling" else "expired", now_ms)
        elif batch.status == "validating":
            if batch.id not in self._validating:
                self._validating.add(batch.id)
                gevent.spawn(self._validate, batch)
        elif not self._rows.has(batch.id, PENDING, RUNNING):
            self._upkeep.end(batch, "completed", now_ms)

    def _validate(self, batch: ActiveBatch) -> None:
        try:
            if self._upkeep.validate(batch, self._ledger.owner, self._ledger.now_ms()):
                self._wake.set()
        except Unavailable:
            pass  # it is tried again
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, batch=batch.id)
        finally:
            self._validating.discard(batch.id)

    def _claim(self, ready: list[ActiveBatch], now_ms: int) -> None:
        """Claim rows for the free places: those of batches that have the fewest running here come first."""
        free = self._server.settings.batch_concurrency - len(self._running)
        ready = sorted(ready, key=lambda batch: sum(one.batch.id == batch.id for one in self._running.values()))
        for place, batch in enumerate(ready):
            if free <= 0 or self._stopped:
                return
            share = -(-free // (len(ready) - place))
            for row in self._rows.claim(batch.id, self._ledger.owner, share, now_ms):
                running = self._running[row.batch_id, row.number] = RunningRow(batch, row)
                free -= 1
                gevent.spawn(self._answer, running)

    def _answer(self, running: RunningRow) -> None:
        """Run a row, and store what came of it."""
        row = running.row
        record = self._record(running)
        try:
            status, output, retry = self._outcome(running, record)
            self._store(running, status, output, self._ledger.now_ms() + int(retry * 1000))
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, request_id=row.request_id)
        finally:
            if running.lease is not None:
                running.lease.drop()
            self._running.pop((row.batch_id, row.number), None)
            self._wake.set()

    def _store(self, running: RunningRow, status: str, output: bytes | None, retry_ms: int) -> None:
        """Store an outcome, as soon as the store answers. A worker that ends before leaves the row to others."""
        settlement = None if running.lease is None else running.lease.settlement
        while True:
            try:
                self._rows.finish(
                    running.row,
                    self._ledger.owner,
                    status,
                    output=output,
                    settlement=settlement,
                    retry_ms=retry_ms if status == PENDING else 0,
                )
            except Unavailable:
                if self._stopped:
                    return
                gevent.sleep(1.0)
            else:
                return

    def _outcome(self, running: RunningRow, record: AccessRecord) -> tuple[str, bytes | None, float]:
        """Run the row's request. Return the row's status, its output, and after how many seconds it may be tried
        again."""
        row = running.row
        key = (row.batch_id, row.number)
        operation = OPERATIONS[running.batch.endpoint]
        request: Request | None = None
        try:
            if row.crashes >= MAX_CRASHES:
                raise InternalError(f"{row.crashes} processes ended while they ran this request")
            request = self._request(running, record, operation)
            answer = invoke(self._server, request)
        except ClientGone:
            record.finish(Aborted.status, "the batch was stopped")
            return PENDING, None, 0.0
        except (Unavailable, LimitExceeded) as error:
            record.finish(error.status, error.logged)
            return PENDING, None, min(error.retry_after or 1.0, MAX_RETRY_SECONDS)
        except ServingError as error:
            if isinstance(error, NotFound) and self._is_coming(row):
                record.finish(error.status, error.logged)
                return PENDING, None, COMING_SECONDS
            answer = error_answer(operation.dialect if request is None else request.dialect, error)
            record.finish(error.status, error.logged)
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, request_id=row.request_id)
            record.finish(InternalError.status, "internal error")
            self._faults[key] = self._faults.get(key, 0) + 1
            if self._faults[key] < MAX_FAULTS:
                return PENDING, None, 1.0
            answer = error_answer(operation.dialect, InternalError("internal error"))
        self._faults.pop(key, None)
        record.finish(answer.status)
        return (DONE if answer.status < 400 else FAILED), _output(running.row, record, answer), 0.0

    def _request(self, running: RunningRow, record: AccessRecord, operation: Operation) -> Request:
        batch, row = running.batch, running.row
        caller = self._caller(batch)
        record.key = caller.key_id if self._server.requires_key else None
        body: bytes = msgspec.json.decode(row.line, type=_Line).body
        return Request(
            operation=operation,
            record=record,
            headers={},
            caller=caller,
            receive=lambda allocation: _received(body, allocation),
            is_large=len(body) >= self._server.settings.offload_bytes,
            address=batch.tenant,
            watch=running.watch,
            background=Background(
                seconds=max((batch.expires_ms - self._ledger.now_ms()) / 1000, 0.001),
                labels=Labels(client_request_id=row.custom_id[:256], tags={"batch_id": batch.id}),
                admitted=running.admitted,
            ),
        )

    def _is_coming(self, row: ClaimedRow) -> bool:
        """Return whether the row's model is an endpoint that exists, but is not served at the moment."""
        follower = self._server.follower
        if follower is None or not follower.missing:
            return False
        model = msgspec.json.decode(msgspec.json.decode(row.line, type=_Line).body).get("model")
        return isinstance(model, str) and model.partition(":")[0] in follower.missing

    def _caller(self, batch: ActiveBatch) -> Caller:
        """Return the batch's caller with its permissions of now. Raises ``Unauthenticated`` if its key is no longer
        valid, and ``PermissionDenied``."""
        check_tenant(batch.caller.tenant)
        keys = self._server.keys
        if keys is None or not batch.caller.key_id.startswith("key_"):
            return batch.caller
        try:
            key = keys.get(batch.caller.key_id)
        except NotFound:
            raise Unauthenticated("the API key of this batch no longer exists") from None
        if (state := key.state(self._ledger.now_ms())) != "active":
            raise Unauthenticated(f"the API key of this batch is {state}")
        caller = Caller(
            key_id=key.key_id, tenant=key.tenant, scopes=key.scopes, endpoints=key.endpoints, weight=key.weight
        )
        caller.check_scope(Auth.INVOKE.scope)
        return caller

    def _record(self, running: RunningRow) -> AccessRecord:
        tracer = self._server.tracer
        return AccessRecord(
            request_id=running.row.request_id,
            method="POST",
            path=running.batch.endpoint,
            trace=tracer.context(None, None),
            tracer=tracer,
        )


class _Line(msgspec.Struct):
    body: msgspec.Raw


def _received(body: bytes, allocation: Any) -> bytes:
    allocation.grow(len(body))
    return bytes(body)


def _output(row: ClaimedRow, record: AccessRecord, answer: Answer) -> bytes:
    """Return the line of the output or error file."""
    if not isinstance(answer.body, bytes):
        raise InvalidField("body.stream", True, "false or null: a batch has whole replies")
    body = msgspec.Raw(
        answer.body if b"\n" not in answer.body else msgspec.json.encode(msgspec.json.decode(answer.body))
    )
    response = {"status_code": answer.status, "request_id": record.reply_id or row.request_id, "body": body}
    line = {"id": row.request_id, "custom_id": row.custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"
