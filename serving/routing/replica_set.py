"""One engine to the rest of a worker, none to several processes behind it. Implements ``engine.interface.Engine``."""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from gevent.event import Event as Signal

from .. import logs
from ..engine.interface import AdapterInfo, Engine, EngineInfo, EngineRecord, EventStream, Health, TappableStream
from ..errors import DeadlineExceeded, ShuttingDown, Unavailable
from ..events import Event, Failed
from ..request import ValidRequest

ASK_AGAIN = 1.0  # seconds after which a waiting request asks for a replica again
RETRY_AFTER = 5.0  # seconds, for callers that are refused because there is no engine
BEST_FIRST: tuple[Literal["ready", "draining", "stalled", "starting", "dead"], ...] = (
    "ready",
    "draining",
    "stalled",
    "starting",
    "dead",
)
NOT_SUMMED = ("status", "last_step_age", "processor_wait")
PAST = 64  # engine processes of former replicas of which the last counters are kept


class _Replica:
    """One engine process of the set. ``streams`` are those that are still held: what runs here for this worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: weakref.WeakSet[EventStream] = weakref.WeakSet()

    def submit(self, request: ValidRequest) -> EventStream:
        stream = self.engine.submit(request)
        self.streams.add(stream)
        return stream

    def hand_over(self, other: _Replica) -> None:
        """Let ``other`` go on with all that runs here."""
        for stream in list(self.streams):
            if self.engine.hand_over(stream, other.engine):
                self.streams.discard(stream)
                other.streams.add(stream)

    @property
    def is_ready(self) -> bool:
        return self.engine.health().status == "ready"

    @property
    def load(self) -> tuple[bool, int]:
        """Orders replicas: those that make progress first, then by what this worker has running there."""
        return (not self.is_ready, len(self.streams))


class ReplicaSet(Engine):
    """The replicas of one model as one engine, used by the greenlets of one worker.

    ``open(address)`` attaches to a replica and may block; ``request_replica()`` asks for one where there is none.
    Requests wait ``away_timeout`` seconds for replicas that should be there, without end for None, and for those that
    are requested, unless by ``record()`` a start takes longer than they have. ``info`` is that of one replica.
    """

    def __init__(
        self,
        info: EngineInfo,
        adapters: tuple[AdapterInfo, ...],
        *,
        open: Callable[[str], Engine],
        request_replica: Callable[[], object],
        away_timeout: float | None = None,
        record: Callable[[], EngineRecord] = EngineRecord,
    ) -> None:
        self._info = info
        self._adapters = adapters
        self._open, self._request_replica, self._away_timeout = open, request_replica, away_timeout
        self._record = record
        self._expected = False
        self._woken_at: float | None = None  # when a request first found it unloaded
        self._active: dict[str, _Replica] = {}
        self._leaving: list[tuple[str, _Replica]] = []
        self._past: dict[str, Health] = {}  # the last counters of those that are closed
        self._requested_at = 0.0
        self._arrived = Signal()
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    def update_info(self, info: EngineInfo) -> None:
        """Of an engine that was started again elsewhere, perhaps with other settings."""
        self._info = info

    @property
    def num_replicas(self) -> int:
        return len(self._active)

    @property
    def addresses(self) -> set[str]:
        """Of every engine that this worker may still have requests on."""
        return {*self._active, *(address for address, _ in self._leaving)}

    def set_addresses(self, addresses: tuple[str, ...]) -> bool:
        """Requests go to these from now on. False where one of them does not answer: to be tried again."""
        opened: dict[str, _Replica] = {}
        for address in addresses:
            with contextlib.suppress(Unavailable):
                opened[address] = self._active.get(address) or _Replica(self._open(address))
        self._leaving += [(a, replica) for a, replica in self._active.items() if a not in addresses]
        self._active, self._expected = opened, bool(addresses)
        if opened:
            self._woken_at = None
            self._arrived.set()
        else:
            self._arrived.clear()
        return len(opened) == len(addresses)

    @property
    def is_settled(self) -> bool:
        """Whether ``rescue`` and ``release_idle`` have nothing to do."""
        return not self._leaving and all(not len(one.streams) or one.is_ready for one in self._active.values())

    def rescue(self) -> None:
        """What runs on a replica that makes no progress goes on where there is one that does; where there is none it
        waits, and asks for a replica: an engine that is not there cannot report that it has work."""
        for replica in (replica for replica in self._each() if len(replica.streams) and not replica.is_ready):
            if others := [other for other in self._active.values() if other.is_ready]:
                replica.hand_over(min(others, key=lambda other: other.load))
            elif time.monotonic() - self._requested_at > ASK_AGAIN:
                self._requested_at = time.monotonic()
                with contextlib.suppress(OSError):  # the server's directory went with it; we still finish what runs
                    self._request_replica()

    def _each(self) -> tuple[_Replica, ...]:
        return (*self._active.values(), *(replica for _, replica in self._leaving))

    def release_idle(self) -> bool:
        """Close the clients of former replicas on which nothing runs any more; whether there were any."""
        over = [(address, replica) for address, replica in self._leaving if not len(replica.streams)]
        for address, replica in over:
            self._leaving.remove((address, replica))
            self._past |= replica.engine.process_health()
            replica.engine.close()
        while len(self._past) > PAST:
            del self._past[next(iter(self._past))]
        return bool(over)

    def submit(self, request: ValidRequest) -> EventStream:
        """To the replica with the fewest of this worker's requests, of a task to the one that has its adapter; where
        there is none, the request waits for one."""
        replicas = self._active
        if not replicas:
            return _WaitingStream(self, request)
        if len(replicas) == 1:
            return next(iter(replicas.values())).submit(request)
        if request.lora_task is not None:
            return self._of_task(request).submit(request)
        return min(replicas.values(), key=lambda replica: replica.load).submit(request)

    def _of_task(self, request: ValidRequest) -> _Replica:
        """The same one for every request of a task, whichever worker has it, as long as it is ready (rendezvous
        hashing, Thaler and Ravishankar 1996): its adapter was sent once, to one engine."""
        assert request.lora_task is not None
        task = f"{request.tenant}\n{request.lora_task.task_id}"
        ready = [one for one in self._active.items() if one[1].is_ready] or list(self._active.items())
        return max(ready, key=lambda one: hashlib.blake2b(f"{one[0]}\n{task}".encode(), digest_size=8).digest())[1]

    def await_replica(self, deadline: float | None) -> Failed | None:
        """Wait for a replica until ``deadline`` (``time.monotonic``); the failure where none came, or will in time."""
        since = time.monotonic()
        if self._woken_at is None:
            self._woken_at = since
        expected = self._record().start_seconds
        while not self._active:
            if self._closed:
                return Failed(ShuttingDown.kind, "the engine was closed")
            if self._expected and self._away_timeout is not None and time.monotonic() - since > self._away_timeout:
                return Failed(Unavailable.kind, "the engine is not running", None, RETRY_AFTER)
            left = None if expected is None else max(ASK_AGAIN, self._woken_at + expected - time.monotonic())
            if deadline is not None and time.monotonic() >= deadline:
                return Failed(DeadlineExceeded.kind, "no replica was ready in time", None, left or ASK_AGAIN)
            self._request_replica()
            if left is not None and deadline is not None and not self._expected and time.monotonic() + left > deadline:
                text = f"the model is not loaded; that takes about {left:.0f} s, longer than this request may take"
                return Failed(Unavailable.kind, text, None, left)
            turn = ASK_AGAIN if deadline is None else min(ASK_AGAIN, max(0.01, deadline - time.monotonic()))
            self._arrived.wait(turn)
        return None

    def record(self) -> EngineRecord:
        return self._record()

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Into every replica there is now."""
        if not self._active:
            raise Unavailable("no replica is running", retry_after=ASK_AGAIN)
        engines = [replica.engine for replica in self._active.values()]
        loaded = [engine.load_adapter(name, path, replace=replace, pinned=pinned) for engine in engines]
        return loaded[0]

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """From every replica there is now."""
        if not self._active:
            raise Unavailable("no replica is running", retry_after=ASK_AGAIN)
        for replica in self._active.values():
            replica.engine.unload_adapter(name, at_once=at_once)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Of one replica, the first that makes progress; those of the model while none runs."""
        if not self._active:
            return self._adapters
        found = min(self._active.values(), key=lambda replica: not replica.is_ready)
        return found.engine.adapters()

    def process_health(self) -> Mapping[str, Health]:
        """The last ``Health`` of each engine process that served here, by generation, former replicas' included."""
        found = dict(self._past)
        for replica in self._each():
            found |= replica.engine.process_health()
        return found

    def health(self) -> Health:
        """The sums over all replicas, the best of their states, for requests move to it; "ready" where none is wanted,
        "starting" where those that should be there could not be reached yet. ``last_step_age``: of those that have work
        or are not ready the greatest, where all are idle the least; ``processor_wait``: the greatest."""
        each = [replica.engine.health() for replica in self._active.values()]
        if len(each) == 1:
            return each[0]
        present = {health.status for health in each} or {"starting" if self._expected else "ready"}
        status = next(status for status in BEST_FIRST if status in present)
        summed = [name for name in Health.__struct_fields__ if name not in NOT_SUMMED]
        sums: dict[str, Any] = {name: sum(getattr(health, name) for health in each) for name in summed}
        busy = [h.last_step_age for h in each if h.num_running or h.num_waiting or h.status != "ready"]
        age = max(busy) if busy else min((h.last_step_age for h in each), default=0.0)
        wait = max((h.processor_wait for h in each), default=0.0)
        return Health(status=status, last_step_age=age, processor_wait=wait, **sums)

    def close(self) -> None:
        self._closed = True
        self._arrived.set()
        for replica in self._each():
            try:
                replica.engine.close()
            except Exception:
                logs.event("an engine's client did not close", level=30, exc_info=True)
        self._active, self._leaving = {}, []


class _WaitingStream:
    """The events of a request that waits for a replica."""

    def __init__(self, replicas: ReplicaSet, request: ValidRequest) -> None:
        self._replicas, self._request = replicas, request
        self._stream: EventStream | None = None
        self._take: Callable[[Event], bool] | None = None
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        if self._stream is None:
            failed = self._replicas.await_replica(self._request.deadline)
            if failed is not None:
                self._over = True
                return failed
            self._stream = self._replicas.submit(self._request)
            if self._take is not None:
                self.tap(self._take)
        return next(self._stream)

    def tap(self, take: Callable[[Event], bool]) -> bool:
        """See ``TappableStream``: of the stream that it waits for, once that is there."""
        self._take = take
        return self._stream is None or (isinstance(self._stream, TappableStream) and self._stream.tap(take))

    def have_reader(self, run: Callable[[], object]) -> None:
        stream: Any = self._stream  # it offers nothing before it is there
        stream.have_reader(run)

    def finish(self, index: int) -> None:
        if self._stream is not None:
            self._stream.finish(index)

    def close(self) -> None:
        self._over = True
        if self._stream is not None:
            self._stream.close()
