"""``instant_core.InstantCore`` behind the ``Engine`` interface, in this process and without a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from ..interface.bundle import Bundle
from ..interface.engine import AdapterInfo, Engine, EngineInfo, Health
from ..interface.events import Embedded, Event, Failed, Finished
from ..interface.request import ValidRequest
from ..interface.settings import EngineSettings
from .instant_core import InstantCore


class InstantEngine(Engine):
    """``InstantCore`` in this process: reading a stream runs the steps."""

    def __init__(self, bundle: Bundle, settings: EngineSettings | None = None) -> None:
        self.core = InstantCore(bundle, settings or EngineSettings())
        self.lock = threading.RLock()
        self._streams: dict[str, InstantStream] = {}
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    def submit(self, request: ValidRequest) -> InstantStream:
        with self.lock:
            stream = InstantStream(self, request)
            if self._closed:
                stream.put(Failed("shutting_down", "the engine is closed"))
            elif request.request_id in self._streams:
                stream.put(Failed("already_exists", f"request {request.request_id} is running"))
            else:
                self._streams[request.request_id] = stream
                self.core.add(request, "")
            return stream

    def advance(self) -> None:
        """Run one step and hand its events out."""
        with self.lock:
            for _, request_id, event in self.core.step():
                if request_id in self._streams:
                    self._streams[request_id].put(event)

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        with self.lock:
            return self.core.load_adapter(name, path, replace=replace, pinned=pinned)

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        with self.lock:
            self.core.unload_adapter(name, at_once=at_once)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self.core.adapters()

    def health(self) -> Health:
        return self.core.health()

    def close(self) -> None:
        with self.lock:
            self._closed = True
            for stream in list(self._streams.values()):
                stream.put(Failed("shutting_down", "the engine was closed"))
            self.core.close()


class InstantStream:
    def __init__(self, engine: InstantEngine, request: ValidRequest) -> None:
        self._engine, self._request = engine, request
        self._events: deque[Event] = deque()
        self._open = len(request.sequences)

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Finished | Embedded):
            self._open -= 1
        elif isinstance(event, Failed):
            self._open = 0
        if self._open == 0:
            self._engine.forget(self._request.request_id)

    @property
    def is_over(self) -> bool:
        return not self._open and not self._events

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._engine.lock:
            while not self._events:
                if self._open == 0:
                    raise StopIteration
                self._engine.advance()
            return self._events.popleft()

    def finish(self, index: int) -> None:
        with self._engine.lock:
            self._engine.core.finish(self._request.request_id, index)

    def close(self) -> None:
        with self._engine.lock:
            if self._open:
                self._engine.core.abort(self._request.request_id)
                self._engine.advance()
            self._events.clear()
