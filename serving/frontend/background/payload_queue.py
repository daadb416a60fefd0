"""The queue of finished requests before the payload log: requests never wait for the store, and the queue is bounded.

A greenlet writes what has been queued, many requests in one transaction. What finds no room, or cannot be written, is
dropped and counted (``mlflow_llm_payloads_dropped``), and a line of the log says how many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import gevent
from gevent.event import Event

from ...interface.errors import Unavailable
from ...interface.payload_log import MAX_TEXT, PayloadLog
from ...metering.usage.payloads import Payload, Payloads
from ...observability import metrics
from ...observability.payload_capture import Capture, Captured
from ...system import logs

MAX_QUEUED = 1000
MAX_QUEUED_BYTES = 16 * 2**20
GROUP_ROWS = 100
GROUP_BYTES = 2**20
GATHER_SECONDS = 0.2  # how long more requests are awaited for one transaction
RETRY_SECONDS = 1.0
PRUNE_SECONDS = 60.0
WRITE_SECONDS = 2.0


class PayloadQueue:
    """The queue of one worker. Create it after the fork, on the event loop's thread, and ``start`` it.

    ``now_ms`` is the store's time.
    """

    def __init__(self, payloads: Payloads, now_ms: Callable[[], int]) -> None:
        self._payloads, self._now_ms = payloads, now_ms
        self._queued: deque[Captured] = deque()
        self._bytes = 0
        self._dropped = 0  # since the last line of the log
        self._arrived = Event()
        self._closing = False
        self._pruned = 0.0
        self._writer: gevent.Greenlet | None = None

    def start(self) -> None:
        self._writer = gevent.spawn(self._run)

    def capture(self, settings: PayloadLog, *, tenant: str, key_id: str, body: bytes) -> Capture:
        """Return what a request's record keeps for the log. A body that is too long is not kept."""
        kept = body if len(body) <= MAX_TEXT else None
        return Capture(settings=settings, tenant=tenant, key_id=key_id, body=kept, send=self.put)

    def put(self, captured: Captured) -> None:
        """Queue a finished request; drop it if there is no room."""
        if len(self._queued) >= MAX_QUEUED or self._bytes + captured.size > MAX_QUEUED_BYTES:
            self._drop([captured])
            return
        self._queued.append(captured)
        self._bytes += captured.size
        self._arrived.set()

    def _drop(self, group: list[Captured]) -> None:
        self._dropped += len(group)
        for one in group:
            metrics.PAYLOADS_DROPPED.labels(one.row.endpoint).inc()

    def _run(self) -> None:
        while not (self._closing and not self._queued):
            self._arrived.wait(PRUNE_SECONDS)
            self._arrived.clear()
            if not self._closing:
                gevent.sleep(GATHER_SECONDS)
            self.flush()
            self._prune()

    def flush(self) -> None:
        """Write all that is queued, waiting for the store if it is away, and log how many requests were dropped."""
        self._write_all()
        self._say()

    def _write_all(self) -> None:
        while self._queued:
            group = self._group()
            try:
                self._write(group)
            except Unavailable:
                if self._closing:
                    self._drop(group)
                    continue
                self._queued.extendleft(reversed(group))
                self._bytes += sum(one.size for one in group)
                self._say()
                gevent.sleep(RETRY_SECONDS)
            except Exception:
                logs.event("the payload log could not be written", level=40, exc_info=True)
                self._drop(group)
            except BaseException:  # the writer is killed
                self._drop(group)
                raise

    def _group(self) -> list[Captured]:
        """Take the next requests for one transaction from the queue."""
        group: list[Captured] = []
        size = 0
        while self._queued and len(group) < GROUP_ROWS and (not group or size + self._queued[0].size <= GROUP_BYTES):
            one = self._queued.popleft()
            size += one.size
            group.append(one)
        self._bytes -= size
        return group

    def _write(self, group: list[Captured]) -> None:
        rows = gevent.get_hub().threadpool.apply(_rows, (group,))
        self._payloads.add(rows, self._now_ms(), timeout=WRITE_SECONDS)

    def _say(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            logs.event("requests are missing in the payload log", level=30, missing=dropped)

    def _prune(self) -> None:
        if self._closing or time.monotonic() - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = time.monotonic()
        try:
            self._payloads.prune(self._now_ms())
        except Unavailable:
            pass  # it is tried again; what is too old is not read meanwhile
        except Exception:
            logs.event("old rows of the payload log could not be deleted", level=40, exc_info=True)

    def close(self, seconds: float) -> None:
        """Write what is queued, within ``seconds``; what is left then is dropped, and counted."""
        self._closing = True
        self._arrived.set()
        if self._writer is not None:
            self._writer.join(seconds)
            self._writer.kill()
        if self._queued:
            self._drop(list(self._queued))
            self._queued.clear()
        self._say()


def _rows(group: list[Captured]) -> list[tuple[Payload, PayloadLog]]:
    return [(one.payload(), one.settings) for one in group]
