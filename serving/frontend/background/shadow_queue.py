"""The queue of copies of requests before the shadows of an endpoint: no request waits for it, and it is bounded.

What finds no room is dropped and counted (``mlflow_llm_shadows_dropped``).
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from gevent.event import Event

from ...interface.labels import Labels
from ...interface.payload_log import PayloadLog
from ...interface.request import RawRequest
from ...metering.accounts.authorization import Caller
from ...observability import metrics
from ...routing.served_endpoints import ServedEntity

MAX_BYTES = 16 * 2**20
"""Bytes of bodies whose copies wait in one worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCopy:
    """A copy of the request ``request_id`` for the shadow ``entity``.

    ``size`` is that of its body. ``payload_log`` is None if the request itself is not in the payload log.
    """

    request_id: str
    entity: ServedEntity
    raw: RawRequest
    size: int
    path: str
    caller: Caller
    labels: Labels
    payload_log: PayloadLog | None = None


class ShadowQueue:
    """The copies that wait in one worker, by the endpoint and name of their entity. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._queued: dict[tuple[str, str], deque[ShadowCopy]] = {}
        self._bytes = 0
        self._closed = False
        self.arrived = Event()

    def put(self, copy: ShadowCopy) -> None:
        """Queue a copy; drop it if there is no room. This never waits and never fails."""
        assert copy.entity.shadow is not None
        queued = self._queued.setdefault(_place(copy), deque())
        if self._closed or len(queued) >= copy.entity.shadow.max_queued or self._bytes + copy.size > MAX_BYTES:
            drop(copy)
            return
        queued.append(copy)
        self._bytes += copy.size
        self.arrived.set()

    def take(self, running: dict[tuple[str, str], int]) -> ShadowCopy | None:
        """Return the next copy for an entity that runs fewer than it may; None if there is none."""
        for place, queued in list(self._queued.items()):
            if not queued:
                del self._queued[place]
                continue
            shadow = queued[0].entity.shadow
            assert shadow is not None
            if running.get(place, 0) < shadow.max_concurrent:
                copy = queued.popleft()
                self._bytes -= copy.size
                return copy
        return None

    def __len__(self) -> int:
        return sum(map(len, self._queued.values()))

    def close(self) -> None:
        """Drop what is queued, and all that comes from now on."""
        self._closed = True
        for queued in self._queued.values():
            for copy in queued:
                drop(copy)
        self._queued.clear()
        self._bytes = 0
        self.arrived.set()


def _place(copy: ShadowCopy) -> tuple[str, str]:
    return copy.entity.endpoint, copy.entity.entity


def drop(copy: ShadowCopy) -> None:
    """Count a copy that its entity does not get."""
    metrics.SHADOWS_DROPPED.labels(*_place(copy)).inc()


def is_drawn(entity: ServedEntity, request_id: str) -> bool:
    """Return whether ``entity`` gets a copy of a request: a pure function of its name and the request's id."""
    assert entity.shadow is not None
    digest = hashlib.blake2b(f"{entity.endpoint}\n{entity.entity}\n{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < entity.shadow.sample * 2**64
