"""The client's side of the protocol, sans-IO: frames in, events and frames out.

It uses no socket and no thread, and reads the clock only to compute the time left until a deadline; ``io_loop`` drives
it on a thread or a greenlet. Only the loop's owner calls methods that put frames into ``outbox``.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol, TypeAlias

from ...interface.engine import AdapterInfo, EngineInfo, Health
from ...interface.errors import EngineDied, PoisonRequest, ServingError, ShuttingDown, from_kind
from ...interface.request import ValidRequest
from .. import protocol as m
from .inflight import EventSink, InflightRequest

MAX_RESTARTS = 3
SUSPECT_RESTARTS = 2  # after so many restarts without an event, a request runs alone: it may be a poison request
DRAIN_RETRY_SECONDS = 5.0  # seconds
MAX_GENERATIONS = 16  # number of engine processes whose last heartbeat is kept


Answered: TypeAlias = tuple[AdapterInfo, ...] | m.JournalPage
Call: TypeAlias = m.LoadAdapter | m.UnloadAdapter | m.ListAdapters | m.ReadJournal


class Waiter(Protocol):
    """A call that waits. ``answer`` is called once, with the call's result or the error that it raises."""

    def answer(self, result: Answered | ServingError) -> None: ...


class ClientState:
    """The requests and calls of one client, numbered by the client, and what it knows about its engine.

    ``name`` is the same on all connections. ``journal`` and ``counts`` are directories for the engine's journal and
    counters, and ``store`` the id of the ledger's store (``protocol.Hello``), "" for none. An engine with another
    ``content_hash`` is refused; "" accepts any.
    """

    def __init__(
        self, name: str, *, journal: str = "", counts: str = "", content_hash: str = "", store: str = ""
    ) -> None:
        self.name, self.journal, self.counts, self.content_hash = name, journal, counts, content_hash
        self.store = store
        self.outbox: deque[bytes] = deque()
        self.info: EngineInfo | None = None
        self.generation = ""
        self.health = Health(status="starting")
        self.last_health: dict[str, Health] = {}  # the last heartbeat of each engine process, by generation
        self.step_age: float | None = None  # seconds since the last step, if reported since the loop last checked
        self.closing: str | None = None  # the engine's reason for ending on purpose
        self.lost = False  # the engine does not know this client
        self.refused = ""  # why this client cannot use the engine
        self.progressed = True  # whether there was progress since the loop last checked
        self._running: dict[int, InflightRequest] = {}
        self._alone: InflightRequest | None = None  # a suspected poison request; all others wait for its first event
        self._calls: dict[int, tuple[Call, Waiter]] = {}
        self._last_number = 0
        self.resumes = False  # whether the engine can resume a sequence: only then are requests paused

    @property
    def busy(self) -> bool:
        return bool(self._running or self._calls)

    @property
    def welcome(self) -> bool:
        return bool(self.generation)

    def running(self) -> list[InflightRequest]:
        return list(self._running.values())

    # towards the engine

    def hello(self, client_id: str) -> None:
        """Start over on a new connection: the state of the old one is no longer valid."""
        self.outbox.clear()
        self.generation, self.closing, self.lost, self.refused = "", None, False, ""
        hello = m.Hello(client_id, name=self.name, journal=self.journal, counts=self.counts, store=self.store)
        self.outbox.append(m.encode(hello))

    def submit(self, request: ValidRequest, sink: EventSink) -> int:
        """Run a request and return its number on this connection."""
        number = self._next()
        running = InflightRequest(request, number, sink)
        if running.done:
            return number
        if self.welcome and self.health.status == "draining":
            running.fail(ShuttingDown("the engine is shutting down", retry_after=DRAIN_RETRY_SECONDS))
            return number
        self._running[number] = running
        if self.welcome and self._alone is None:
            self._send(running, request)
        return number

    def _send(self, running: InflightRequest, request: ValidRequest) -> None:
        time_left = None if request.deadline is None else request.deadline - time.monotonic()
        self.outbox.append(m.encode(m.Submit(running.number, request, running.sent, time_left)))
        running.sent = running.submitted = True

    def release(self, number: int) -> InflightRequest | None:
        """Give up a request that continues on another client, and return it; None if it has ended."""
        running = self._running.get(number)
        if running is not None:
            self.abort(number)
            running.submitted = False
            if running.phase == "pausing":
                running.move("paused")
        return running

    def adopt(self, running: InflightRequest) -> int:
        """Continue a request that another client has released, and return its new number."""
        running.number = number = self._next()
        self._running[number] = running
        if self.welcome and self._alone is None:
            self._start(running)
        return number

    def _start_waiting(self) -> None:
        """Start the requests that are not in the engine.

        If there are suspected poison requests, only the first of them starts; otherwise all requests do.
        """
        self._alone = None
        waiting = [running for running in self.running() if not running.submitted or running.phase == "paused"]
        for suspect in waiting:
            if suspect.restarts >= SUSPECT_RESTARTS and suspect.phase == "running":
                self._start(suspect)
                if not suspect.done:
                    self._alone = suspect
                    return
        for running in waiting:
            if not running.done:
                self._start(running)

    def _start(self, running: InflightRequest) -> None:
        if running.phase == "running":
            self._resubmit(running)
        else:
            self._go_on(running)

    def abort(self, number: int) -> None:
        """Drop a request that no longer has a reader, and ignore the events that still arrive for it."""
        running = self._running.pop(number, None)
        if running is not None and self.welcome:
            self.outbox.append(m.encode(m.Abort(number)))
            if running is self._alone:
                self._start_waiting()

    def finish(self, number: int, index: int) -> None:
        running = self._running.get(number)
        if running is None or index not in running.open:
            return
        running.ending.add(index)
        if running.submitted and running.phase != "paused":
            self.outbox.append(m.encode(m.Finish(number, running.attempt.index(index))))

    def _pause(self, running: InflightRequest) -> None:
        """Take a request with a slow reader out of the engine, to make room for others (back-pressure)."""
        running.move("pausing")
        running.wanted = False
        for index in running.open - running.ending:
            self.outbox.append(m.encode(m.Finish(running.number, running.attempt.index(index))))

    def resume(self, number: int) -> None:
        """Continue a paused request whose reader has room again; a "pausing" one continues once it is paused."""
        running = self._running.get(number)
        if running is not None:
            running.wanted = True
            self._go_on(running)

    def _go_on(self, running: InflightRequest) -> None:
        if running.phase == "paused" and running.wanted and self.welcome and self._alone is None:
            running.move("running")
            self._resubmit(running)

    def load_adapter(self, name: str, path: str, replace: bool, pinned: bool, waiter: Waiter) -> None:
        self._call(m.LoadAdapter(self._next(), name, path, replace, pinned), waiter)

    def unload_adapter(self, name: str, at_once: bool, waiter: Waiter) -> None:
        self._call(m.UnloadAdapter(self._next(), name, at_once), waiter)

    def list_adapters(self, waiter: Waiter) -> None:
        self._call(m.ListAdapters(self._next()), waiter)

    def read_journal(self, name: str, position: int, waiter: Waiter) -> None:
        self._call(m.ReadJournal(self._next(), name, position), waiter)

    def _call(self, message: Call, waiter: Waiter) -> None:
        self._calls[message.call] = (message, waiter)
        if self.welcome:
            self.outbox.append(m.encode(message))

    def _next(self) -> int:
        self._last_number += 1
        return self._last_number

    # from the engine

    def receive(self, frame: bytes) -> None:
        """Process one frame. Raises ``msgspec.DecodeError`` if the bytes are not a message."""
        message = m.decode_for_client(frame)
        if type(message) is m.Events:
            self.progressed, self.step_age = True, 0.0
            for number, event in message.items:
                running = self._running.get(number)
                if running is None:
                    continue  # abandoned
                if not running.deliver(event) or running is self._alone:
                    self._look_after(running)
            return
        match message:
            case m.Heartbeat(health):
                idle = health.num_running + health.num_waiting == 0
                self.progressed = self.progressed or idle or health.steps != self.health.steps
                self._note(health)
            case m.Answer():
                self.progressed = True
                self._answer(message)
            case m.JournalPage(call):
                self._answer_call(call, message)
            case m.Welcome():
                self._welcomed(message)
            case m.Closing(reason):
                self.closing = reason
            case m.Rejected(reason):
                self.lost = True
                self.refused = "" if self.welcome else reason

    def _note(self, health: Health) -> None:
        self.health, self.step_age = health, health.last_step_age
        if self.welcome:
            self.last_health = dict(
                [*(self.last_health | {self.generation: health}).items()][-MAX_GENERATIONS:]
            )  # a new dict, since other threads read the old one

    def _look_after(self, running: InflightRequest) -> None:
        """Update a request's state after one of its events was delivered."""
        if running.done:
            del self._running[running.number]
        elif self.resumes and running.should_pause:
            self._pause(running)
        elif running.phase == "paused":
            self._go_on(running)
        if running is self._alone:
            self._start_waiting()

    def _answer(self, message: m.Answer) -> None:
        failed = message.kind is not None
        error = from_kind(message.kind or "", message.message, param=message.param) if failed else None
        self._answer_call(message.call, error if error is not None else message.adapters)

    def _answer_call(self, number: int, result: Answered | ServingError) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call[1].answer(result)

    def _welcomed(self, message: m.Welcome) -> None:
        """Submit all running requests as continuations; at the first welcome, that is the request itself."""
        self.progressed = True
        if self.content_hash and message.info.content_hash != self.content_hash:
            here, there = self.content_hash, message.info.content_hash
            self.lost = True
            self.refused = f"the engine has another model: its content hash is {there[:12]}, expected {here[:12]}"
            return
        self.generation, self.info = message.generation, message.info
        self.resumes = message.info.capabilities.resumes
        self._note(message.health)
        self._start_waiting()
        for call, _ in self._calls.values():
            self.outbox.append(m.encode(call))

    def _resubmit(self, running: InflightRequest) -> None:
        assert self.info is not None, "there was a welcome"
        request = running.continuation(self.info.max_kv_tokens)
        if request is not None and running.was_delivered and not self.resumes:
            running.fail(died(f"the engine ended, and {self.info.backend} engines do not resume a text"))
            request = None
        if request is None:
            del self._running[running.number]
        else:
            self._send(running, request)

    # when the connection is gone

    def disconnected(self) -> None:
        """Handle the engine's death: calls that change the engine fail, requests wait.

        A request that got no event during more than ``MAX_RESTARTS`` restarts in a row fails. A connection that never
        had a welcome does not count as a restart; nor does a restart count for a request that waited while another one
        ran alone.
        """
        self.generation, self._alone = "", None
        self.outbox.clear()
        for number, running in list(self._running.items()):
            was_there, running.submitted = running.submitted, False
            if running.phase == "pausing":
                running.move("paused")
            if running.phase == "paused":
                continue
            running.restarts += was_there
            if running.restarts > MAX_RESTARTS:
                text = f"the engine died {running.restarts} times in a row on this request; it is not tried again"
                running.fail(PoisonRequest(text))
                del self._running[number]
        for number, (call, waiter) in list(self._calls.items()):
            if not isinstance(call, m.ListAdapters):  # it is unknown whether the engine made the change
                del self._calls[number]
                waiter.answer(died("the engine restarted during the call"))

    def fail_all(self, error: ServingError) -> None:
        """End every request and call with ``error``."""
        running, self._running, self._alone = self._running, {}, None
        for request in running.values():
            request.fail(error)
        calls, self._calls = self._calls, {}
        for _, waiter in calls.values():
            waiter.answer(error)


def died(reason: str) -> EngineDied:
    return EngineDied(reason, retry_after=1.0)
