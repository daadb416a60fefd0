"""The runner of copies of requests in a worker: each shadow answers, and its answer is counted, logged and dropped.

Copies run in greenlets of their own, in the engine after all other requests (``ValidRequest.background``), and in the
ledger without a price or a limit (``modes.shadow``). Nothing of the request that was copied waits for its copy, and a
copy that fails is seen in the log, the metrics and the payload log only.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import gevent

from ..interface.errors import Aborted, InternalError, ServingError
from ..interface.labels import Labels
from ..interface.reply import Piece
from ..modes import Target
from ..observability.access_record import AccessRecord
from ..system import logs
from ..tasks.prepare import Limits, prepare
from ..tasks.reply import generate
from .background.shadow_queue import ShadowCopy, ShadowQueue, drop
from .limits.memory_budget import MemoryBudget
from .run_task import counted, run_task
from .streams.in_flight import ClientGone, InFlightRequests, InterruptibleIterator, interrupt_at_deadline
from .worker_state import PIXEL_BYTES_PER_BYTE, WorkerState

SHADOW_OF = "shadow_of"  # the label of a copy: the id of the request that it is a copy of
PAYER = "shadow"


class ShadowRunner:
    """The runner of one worker. ``start`` it on the event loop, ``stop`` it when the worker ends."""

    def __init__(self, server: WorkerState, queue: ShadowQueue) -> None:
        self._server, self._queue = server, queue
        self._running: dict[tuple[str, str], int] = {}
        self._in_flight = InFlightRequests()
        most = PIXEL_BYTES_PER_BYTE * server.settings.max_caller_bytes
        self._pixels = MemoryBudget(total=most, by_caller=most, what="images")
        self._stopped = False
        self._loop: Any = None

    def start(self) -> None:
        self._loop = gevent.spawn(self._run)

    @property
    def num_running(self) -> int:
        return sum(self._running.values())

    def stop(self, seconds: float) -> None:
        """Drop the copies that wait, and end those that run, within ``seconds``."""
        self._stopped = True
        self._queue.close()
        self._in_flight.interrupt_all(ClientGone())
        with gevent.Timeout(seconds, False):
            while self.num_running or not self._loop.ready():
                gevent.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped:
            self._queue.arrived.wait()
            self._queue.arrived.clear()
            while not self._stopped and (copy := self._queue.take(self._running)) is not None:
                place = (copy.entity.endpoint, copy.entity.entity)
                self._running[place] = self._running.get(place, 0) + 1
                gevent.spawn(self._answer, copy, place)

    def _answer(self, copy: ShadowCopy, place: tuple[str, str]) -> None:
        record = self._record(copy)
        try:
            self._ask(copy, record)
        except ClientGone:
            drop(copy)
            record.finish(Aborted.status, "the server ends")
        except ServingError as error:
            record.finish(error.status, error.logged)
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, request_id=record.request_id)
            record.finish(InternalError.status, "internal error")
        else:
            record.finish(200)
        finally:
            self._running[place] -= 1
            if not self._running[place]:
                del self._running[place]
            self._queue.arrived.set()

    def _record(self, copy: ShadowCopy) -> AccessRecord:
        entity, server = copy.entity, self._server
        record = AccessRecord(
            request_id=copy.request_id,
            method="POST",
            path=copy.path,
            endpoint=entity.endpoint,
            entity=entity.entity,
            model=entity.identity,
            task=copy.raw.task,
            labels=Labels(tags={SHADOW_OF: copy.request_id}).over(copy.labels),
        )
        if copy.payload_log is not None and server.payloads is not None:
            capture = server.payloads.capture(
                copy.payload_log, tenant=copy.caller.tenant, key_id=copy.caller.key_id, body=b""
            )
            capture.shadow_of, capture.admitted = copy.request_id, True  # a refusal says something about the shadow
            record.keep_texts(capture)
        return record

    def _ask(self, copy: ShadowCopy, record: AccessRecord) -> None:
        """Run a copy to its end. Raises ``ServingError``, and ``ClientGone`` if the server ends."""
        server, entity = self._server, copy.entity
        with ExitStack() as held:
            pixels = held.enter_context(self._pixels.allocate(PAYER))
            sharing = entity.prefix_sharing or server.settings.prefix_sharing
            limits = Limits(
                timeout=server.settings.timeout,
                cache_salt=server.salts.of(sharing, tenant=copy.caller.tenant, endpoint=entity.endpoint),
                tenant=server.salts.tenant(copy.caller.tenant),
                weight=copy.caller.weight,
                background=True,
                keep_pixels=pixels.grow,
            )
            valid = server.offload(copy.size, prepare, copy.raw, entity.view, limits)
            record.accept(valid, b"")
            admission = None
            if entity.mode is not None:
                target = Target(
                    endpoint=entity.endpoint,
                    entity=entity.entity,
                    model=entity.identity,
                    adapter_hash=entity.adapter_hash(valid.adapter),
                )
                admission = held.enter_context(entity.mode.admit(valid, copy.caller, target, record.labels))
                valid = admission.request
            pull: InterruptibleIterator[Piece] = InterruptibleIterator(run_task(entity, valid, admission))
            held.callback(pull.close)
            held.enter_context(self._in_flight.track(pull))
            held.enter_context(interrupt_at_deadline(valid.deadline, pull))
            if self._stopped:
                pull.interrupt(ClientGone())
            generate.gather(counted(pull, admission, record, returns_trace=False))
