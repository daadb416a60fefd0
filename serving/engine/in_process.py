"""The engine on a thread of this process, for debugging and tests only (docs/performance.md says why)."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from ..interface.bundle import Bundle
from ..interface.engine import AdapterInfo, Engine, EngineInfo, EngineOutput, EventQueue, EventStream, Health
from ..interface.errors import ShuttingDown
from ..interface.events import Embedded, Event, Failed, Finished
from ..interface.request import ValidRequest
from ..interface.settings import EngineSettings
from .core import EngineCore

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.25  # seconds between looks while a request waits for its grammar, since it may have a deadline
Command = Callable[[EngineCore], None]
Commands: TypeAlias = "queue.SimpleQueue[Command | None]"


class InProcessStream:
    """The events of one request; iterate it from one thread."""

    def __init__(self, engine: InProcessEngine, request: ValidRequest, into: EventQueue | None = None) -> None:
        self._engine = engine
        self._request_id = request.request_id
        self._left = len(request.sequences)
        self._events: EventQueue = queue.SimpleQueue() if into is None else into
        self._done = False

    def put(self, event: Event) -> None:
        """Add an event. Called by the engine's thread."""
        self._events.put(event)

    @property
    def is_over(self) -> bool:
        return self._done

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._done:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, Finished | Embedded):
            self._left -= 1
        self._done = isinstance(event, Failed) or self._left == 0
        return event

    def finish(self, index: int) -> None:
        self._engine.finish(self._request_id, index)

    def close(self) -> None:
        if not self._done:
            self._done = True
            self._engine.abort(self._request_id)


class InProcessEngine(Engine):
    """An engine whose model is loaded and run on one thread of its own, which ``close`` ends."""

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        self._commands: Commands = queue.SimpleQueue()
        self._streams: dict[str, InProcessStream] = {}
        self._lock = threading.Lock()
        self._closed = False
        started: Future[EngineInfo] = Future()
        self._thread = threading.Thread(
            target=_main, args=(bundle, settings, started, self._commands), name="mlflow-llm-engine", daemon=True
        )
        self._thread.start()
        self._info = started.result()
        weakref.finalize(self, self._commands.put, None).atexit = False  # the thread does not hold us

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: ValidRequest, into: EventQueue | None = None) -> EventStream:
        """Start a request. ``into`` replaces the queue of its events, for a reader that is not a thread."""
        stream = InProcessStream(self, request, into)
        if not self._send(lambda core: self._add(core, request, stream)):
            stream.put(Failed(ShuttingDown.kind, "the engine is closed"))
        return stream

    def _add(self, core: EngineCore, request: ValidRequest, stream: InProcessStream) -> None:
        core.add(request, stream)

    def abort(self, request_id: str) -> None:
        self._send(lambda core: core.abort(request_id))

    def finish(self, request_id: str, index: int) -> None:
        self._send(lambda core: core.finish(request_id, index))

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        info: AdapterInfo = self._call(lambda core: core.load_adapter(name, path, replace=replace, pinned=pinned))
        return info

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        self._call(lambda core: core.unload_adapter(name, at_once=at_once))

    def adapters(self) -> tuple[AdapterInfo, ...]:
        infos: tuple[AdapterInfo, ...] = self._call(lambda core: core.adapters())
        return infos

    def health(self) -> Health:
        if self._closed:
            return Health(status="dead")
        health: Health = self._call(lambda core: core.health())
        return health

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if memory or sequences are unaccounted for."""
        self._call(lambda core: core.check_integrity())

    def close(self) -> None:
        """Fail the running requests, end the thread and free the memory. Closing twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, command: Callable[[EngineCore], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._commands.put(command)
            return True

    def _call(self, ask: Callable[[EngineCore], Any]) -> Any:
        answer: Future[Any] = Future()

        def run(core: EngineCore) -> None:
            try:
                answer.set_result(ask(core))
            except Exception as error:
                answer.set_exception(error)

        if not self._send(run):
            raise ShuttingDown("the engine is closed")
        return answer.result()


def _main(bundle: Bundle, settings: EngineSettings, started: Future[EngineInfo], commands: Commands) -> None:
    try:
        core = EngineCore(bundle, settings)
    except BaseException as error:
        started.set_exception(error)
        return
    core.on_work(partial(commands.put, _nothing))
    started.set_result(core.info)
    del started
    while _follow(core, commands):
        _hand_out(core.step() if core.has_work() else [])
    _hand_out(core.close())


def _follow(core: EngineCore, commands: Commands) -> bool:
    """Run the next command; return False at the end. No reference to it stays, since it may refer to the engine."""
    command = _next_command(commands, WAIT_SECONDS if core.waits else None, wait=not core.has_work())
    if command is not None:
        command(core)
    return command is not None


def _next_command(commands: Commands, seconds: float | None, *, wait: bool) -> Command | None:
    try:
        return commands.get(wait, seconds)
    except queue.Empty:
        return _nothing


def _nothing(core: EngineCore) -> None:
    """Return the command that runs between two steps if no other has come."""


def _hand_out(outputs: list[EngineOutput]) -> None:
    for stream, _, event in outputs:
        assert isinstance(stream, InProcessStream)
        stream.put(event)
