"""A replica set looks like one engine to the rest of a worker; behind it are zero or more engine processes. Implements
``engine.interface.Engine``."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from gevent.event import Event as Signal

from ..interface.engine import AdapterInfo, Engine, EngineInfo, EngineRecord, EventStream, Health, is_tappable
from ..interface.errors import DeadlineExceeded, ShuttingDown, Unavailable
from ..interface.events import Event, Failed
from ..interface.request import ValidRequest
from ..system import logs
from .affinity import Affinity, score

ASK_AGAIN_SECONDS = 1.0  # seconds after which a waiting request asks for a replica again
RETRY_SECONDS = 5.0  # seconds, told to callers whose request fails because no engine is running
BEST_FIRST: tuple[Literal["ready", "draining", "stalled", "starting", "dead"], ...] = (
    "ready",
    "draining",
    "stalled",
    "starting",
    "dead",
)
NOT_SUMMED = ("status", "last_step_age", "cpu_wait")
MAX_PAST_ENGINES = 64  # maximum number of former engine processes whose last counters are kept


class _Replica:
    """One engine process of the set."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()  # those that are over may still be among them
        self._report: tuple[int, int] | None = None  # steps and requests, as the engine has said last
        self._own_then = 0  # this worker's requests when it said so

    @property
    def streams(self) -> list[EventStream]:
        """This worker's running requests: the streams that callers hold and have neither read to the end nor closed.

        How long the object of a stream lives says nothing: an error's traceback may keep it for minutes.
        """
        return [stream for stream in self._streams if not stream.is_over]

    @property
    def is_used(self) -> bool:
        return any(not stream.is_over for stream in self._streams)

    def submit(self, request: ValidRequest) -> EventStream:
        stream = self.engine.submit(request)
        self._streams.add(stream)
        return stream

    def hand_over(self, other: _Replica) -> None:
        """Let ``other`` continue all requests that run here, where the engine can move them."""
        for stream in self.streams:
            if self.engine.hand_over(stream, other.engine):
                self._streams.discard(stream)
                other._streams.add(stream)

    @property
    def is_ready(self) -> bool:
        return self.engine.health().status == "ready"

    @property
    def load(self) -> tuple[bool, int]:
        """A sort key for replicas: ready ones first, then by the number of this worker's requests that run there."""
        return (not self.is_ready, len(self.streams))

    @property
    def num_requests(self) -> int:
        """The number of requests of all workers and gateways that run there: as the engine has said last, with this
        worker's since then."""
        own, health = len(self.streams), self.engine.health()
        said = health.num_running + health.num_waiting
        if self._report != (health.steps, said):
            self._report, self._own_then = (health.steps, said), own
        return max(own, said + own - self._own_then)


class ReplicaSet(Engine):
    """The replicas of one model, as one engine for the greenlets of one worker.

    ``open(address)`` attaches to a replica and may block; ``request_replica()`` asks for a replica when there is none.
    If replicas should be running but cannot be reached, requests wait ``away_timeout`` seconds for them (None: without
    limit). Otherwise they wait until a requested replica has started, unless ``record()`` says that a start takes
    longer than the request's time limit. ``info`` describes one replica.
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
        self._open, self._request_replica, self.away_timeout = open, request_replica, away_timeout
        self._record = record
        self._expected = False
        self._woken_at: float | None = None  # when a request first found no replica
        self.active: dict[str, _Replica] = {}
        self._leaving: list[tuple[str, _Replica]] = []
        self._past: dict[str, Health] = {}  # the last counters of closed replicas
        self.requested_at = 0.0
        self._arrived = Signal()
        self._closed = False
        self._affinity = Affinity()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def update_info(self, info: EngineInfo) -> None:
        """Replace ``info`` after the engine was started again elsewhere, perhaps with other settings."""
        self._info = info

    @property
    def num_replicas(self) -> int:
        return len(self.active)

    @property
    def addresses(self) -> set[str]:
        """The addresses of every engine on which this worker may still have requests."""
        return {*self.active, *(address for address, _ in self._leaving)}

    def set_addresses(self, addresses: tuple[str, ...]) -> bool:
        """Send requests to these replicas from now on. Return False if one does not answer, so that it is retried."""
        opened: dict[str, _Replica] = {}
        for address in addresses:
            with contextlib.suppress(Unavailable):
                opened[address] = self.active.get(address) or _Replica(self._open(address))
        self._leaving += [(a, replica) for a, replica in self.active.items() if a not in addresses]
        self.active, self._expected = opened, bool(addresses)
        if opened:
            self._woken_at = None
            self._arrived.set()
        else:
            self._arrived.clear()
        return len(opened) == len(addresses)

    @property
    def is_settled(self) -> bool:
        """Whether ``rescue`` and ``release_idle`` have nothing to do."""
        return not self._leaving and all(not one.is_used or one.is_ready for one in self.active.values())

    def rescue(self) -> None:
        """Move requests from replicas that make no progress to one that is ready.

        If no replica is ready, the requests wait, and this method asks for a replica: an engine that is not running
        cannot report that it has work.
        """
        for replica in (replica for replica in self._each() if replica.is_used and not replica.is_ready):
            if others := [other for other in self.active.values() if other.is_ready]:
                replica.hand_over(min(others, key=lambda other: other.load))
            elif time.monotonic() - self.requested_at > ASK_AGAIN_SECONDS:
                self.requested_at = time.monotonic()
                with contextlib.suppress(OSError):  # the server and its directory are gone; we finish running requests
                    self._request_replica()

    def _each(self) -> tuple[_Replica, ...]:
        return (*self.active.values(), *(replica for _, replica in self._leaving))

    def release_idle(self) -> bool:
        """Close the clients of former replicas on which no request runs any more. Return whether there were any."""
        over = [(address, replica) for address, replica in self._leaving if not replica.is_used]
        for address, replica in over:
            self._leaving.remove((address, replica))
            self._past |= replica.engine.process_health()
            replica.engine.close()
        while len(self._past) > MAX_PAST_ENGINES:
            del self._past[next(iter(self._past))]
        return bool(over)

    def submit(self, request: ValidRequest) -> EventStream:
        """Submit ``request`` to a ready replica, if there is one: one that has its prefix or adapter and not too many
        requests, else the one with the fewest requests (``affinity``).

        A request with a LoRA task goes to the replica that has the task's adapter. Without replicas, it waits for one.
        """
        replicas = self.active
        if not replicas:
            return _WaitingStream(self, request)
        if len(replicas) == 1:
            return next(iter(replicas.values())).submit(request)
        if request.lora_task is not None:
            return self.of_task(request).submit(request)
        ready = [one for one in replicas.items() if one[1].is_ready] or list(replicas.items())
        address = self._affinity.choose(request, ((address, one.num_requests) for address, one in ready))
        return replicas[address].submit(request)

    def of_task(self, request: ValidRequest) -> _Replica:
        """Return the same replica for every request of a LoRA task, in every worker, as long as it is ready.

        The task's adapter was sent once, to one engine. Uses rendezvous hashing (Thaler and Ravishankar 1996).
        """
        assert request.lora_task is not None
        task = f"{request.tenant}\n{request.lora_task.task_id}"
        ready = [one for one in self.active.items() if one[1].is_ready] or list(self.active.items())
        return max(ready, key=lambda one: score(one[0], task.encode()))[1]

    def await_replica(self, deadline: float | None) -> Failed | None:
        """Wait for a replica until ``deadline`` (``time.monotonic``).

        Return a failure if no replica came, or as soon as it is known that none will come in time.
        """
        since = time.monotonic()
        if self._woken_at is None:
            self._woken_at = since
        expected = self._record().start_seconds
        while not self.active:
            if self._closed:
                return Failed(ShuttingDown.kind, "the engine was closed")
            if self._expected and self.away_timeout is not None and time.monotonic() - since > self.away_timeout:
                return Failed(Unavailable.kind, "the engine is not running", None, RETRY_SECONDS)
            left = None if expected is None else max(ASK_AGAIN_SECONDS, self._woken_at + expected - time.monotonic())
            if deadline is not None and time.monotonic() >= deadline:
                return Failed(DeadlineExceeded.kind, "no replica was ready in time", None, left or ASK_AGAIN_SECONDS)
            self._request_replica()
            if left is not None and deadline is not None and not self._expected and time.monotonic() + left > deadline:
                text = f"the model is not loaded; that takes about {left:.0f} s, longer than this request may take"
                return Failed(Unavailable.kind, text, None, left)
            turn = (
                ASK_AGAIN_SECONDS
                if deadline is None
                else min(ASK_AGAIN_SECONDS, max(0.01, deadline - time.monotonic()))
            )
            self._arrived.wait(turn)
        return None

    def record(self) -> EngineRecord:
        return self._record()

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Load an adapter into every current replica."""
        if not self.active:
            raise Unavailable("no replica is running", retry_after=ASK_AGAIN_SECONDS)
        engines = [replica.engine for replica in self.active.values()]
        loaded = [engine.load_adapter(name, path, replace=replace, pinned=pinned) for engine in engines]
        return loaded[0]

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """Unload an adapter from every current replica."""
        if not self.active:
            raise Unavailable("no replica is running", retry_after=ASK_AGAIN_SECONDS)
        for replica in self.active.values():
            replica.engine.unload_adapter(name, at_once=at_once)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters of one replica, preferably a ready one; while none is running, those of the model."""
        if not self.active:
            return self._adapters
        found = min(self.active.values(), key=lambda replica: not replica.is_ready)
        return found.engine.adapters()

    def process_health(self) -> Mapping[str, Health]:
        """Return the last ``Health`` of each engine process that served here, by generation, including former ones."""
        found = dict(self._past)
        for replica in self._each():
            found |= replica.engine.process_health()
        return found

    def health(self) -> Health:
        """Return the health of the set as a whole.

        Counters are summed. ``status`` is the best status of all replicas, because requests move to the best one.
        Without replicas it is "starting" if some are expected but not reached yet, and "ready" if none is expected.
        ``last_step_age`` is the greatest value of the replicas that have work or are not ready; if all are idle, the
        least value. ``cpu_wait`` is the greatest value.
        """
        each = [replica.engine.health() for replica in self.active.values()]
        if len(each) == 1:
            return each[0]
        present = {health.status for health in each} or {"starting" if self._expected else "ready"}
        status = next(status for status in BEST_FIRST if status in present)
        summed = [name for name in Health.__struct_fields__ if name not in NOT_SUMMED]
        sums: dict[str, Any] = {name: sum(getattr(health, name) for health in each) for name in summed}
        busy = [h.last_step_age for h in each if h.num_running or h.num_waiting or h.status != "ready"]
        age = max(busy) if busy else min((h.last_step_age for h in each), default=0.0)
        wait = max((h.cpu_wait for h in each), default=0.0)
        return Health(status=status, last_step_age=age, cpu_wait=wait, **sums)

    def close(self) -> None:
        self._closed = True
        self._arrived.set()
        for replica in self._each():
            try:
                replica.engine.close()
            except Exception:
                logs.event("an engine's client did not close", level=30, exc_info=True)
        self.active, self._leaving = {}, []


class _WaitingStream:
    """The event stream of a request that first waits for a replica."""

    def __init__(self, replicas: ReplicaSet, request: ValidRequest) -> None:
        self._replicas, self._request = replicas, request
        self._stream: EventStream | None = None
        self._take: Callable[[Event], bool] | None = None
        self._over = False

    @property
    def is_over(self) -> bool:
        return self._over or (self._stream is not None and self._stream.is_over)

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
        """See ``TappableStream``. Taps the underlying stream as soon as a replica has provided it."""
        self._take = take
        return self._stream is None or (is_tappable(self._stream) and self._stream.tap(take))

    def have_reader(self, run: Callable[[], object]) -> None:
        stream: Any = self._stream  # it exists by now: before that, ``take`` is not called, which leads here
        stream.have_reader(run)

    def finish(self, index: int) -> None:
        if self._stream is not None:
            self._stream.finish(index)

    def close(self) -> None:
        self._over = True
        if self._stream is not None:
            self._stream.close()
