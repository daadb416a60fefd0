"""The client of an engine process: an ``Engine`` that may be used from any thread and after a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Unpack

import msgspec

from ...interface.bundle import Bundle
from ...interface.engine import AdapterInfo, Engine, EngineInfo, EventQueue, EventStream, Health
from ...interface.errors import ServingError, ShuttingDown, Unavailable
from ...interface.events import Failed
from ...interface.request import ValidRequest
from ...interface.settings import EngineSettings
from ..adapter_places import parse_place
from ..discovery.attacher import Attacher
from ..discovery.launcher import Launcher, Progress
from ..protocol import JournalPage
from .event_stream import RemoteStream, RequestHandle, event_buffer
from .finder import Finder
from .io_loop import IoLoop, WaitOptions
from .poller import Poller, ThreadPoller
from .protocol_state import Answered, ClientState

JOURNAL_SECONDS = 5.0  # seconds that a page of a journal may take
JOIN_SECONDS = 5.0  # seconds that the interpreter's exit may wait for a goodbye
# the gauges while there is no engine
AWAY = dict.fromkeys(("num_running", "num_waiting", "num_provisioned", "kv_tokens_used", "num_standbys"), 0)


class _Call:
    """A call that waits for its answer; the caller and the loop may be on different threads."""

    def __init__(self, box: Any) -> None:
        self._box = box

    def answer(self, result: Answered | ServingError) -> None:
        self._box.put(result)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the answer. Raises the error that is the answer, and ``Unavailable`` after ``timeout`` seconds."""
        try:
            result = self._box.get(timeout=timeout)
        except queue.Empty:
            raise Unavailable("the engine did not answer", retry_after=1.0) from None
        if isinstance(result, ServingError):
            raise result
        return result


class RemoteEngine(Engine):
    """A client with its own io loop. Raises what ``IoLoop.open`` raises.

    ``make_finder`` returns a new ``Finder``; it is called again in a forked child, which is a separate client.

    See ``IoLoop`` for ``stall_timeout`` and ``keep``, and ``ClientState`` for ``journal``, ``counts``,
    ``content_hash`` and ``store``.
    """

    def __init__(
        self,
        make_finder: Callable[[], Finder],
        *,
        stall_timeout: float = 60.0,
        keep: bool = False,
        journal: str = "",
        counts: str = "",
        content_hash: str = "",
        store: str = "",
        **options: Unpack[WaitOptions],
    ) -> None:
        self._identity = {"journal": journal, "counts": counts, "content_hash": content_hash, "store": store}
        self._reopening = threading.Lock()
        self._make_finder = make_finder
        self._stall_timeout, self._keep, self._options = stall_timeout, keep, options
        self._open()

    # replaced by the gevent client

    def _queue(self) -> Any:
        return queue.SimpleQueue()

    def _spawn(self, run: Callable[[], None]) -> Any:
        thread = threading.Thread(target=run, name="mlflow-llm-client", daemon=True)
        thread.start()
        return thread

    def _poller(self) -> Poller:
        return ThreadPoller()

    @staticmethod
    def _rest() -> None:
        """Do nothing: the system switches threads by itself."""

    # lifecycle: the loop's thread must not reference the client, or an unreferenced client would never end

    def _open(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self.state = ClientState(uuid.uuid4().hex[:8], **self._identity)
        self.io = IoLoop(
            self._poller(),
            self._make_finder(),
            self.state,
            stall_timeout=self._stall_timeout,
            keep=self._keep,
            rest=self._rest,
            **self._options,
        )
        started, io = self._queue(), self.io
        self._owner = self._spawn(lambda: _main(io, started))
        error = started.get()
        if error is not None:
            self._closed = True
            self._join()
            raise error
        _open_clients.add(self)
        self._finalizer = weakref.finalize(self, _leave, io, self._owner, self._pid)
        self._finalizer.atexit = False

    def _join(self) -> None:
        self._owner.join(JOIN_SECONDS)

    def forked(self) -> None:
        """Forget the parent's connection, thread and locks in a forked child; the next call opens new ones."""
        self._finalizer.detach()
        self.io.forget()
        self._pid = -1
        self._reopening = threading.Lock()

    def _ready(self) -> None:
        if self._pid == os.getpid() or self._closed:
            return
        with self._reopening:
            if self._pid == -1:
                self._open()

    def post(self, command: Callable[[ClientState], None]) -> bool:
        """Have the loop's owner run ``command``; return False if this client is closed."""
        self._ready()
        with self._lock:
            if self._closed or self.io.stopping:
                return False
            self.io.post(command)
            return True

    # the interface

    @property
    def info(self) -> EngineInfo:
        self._ready()
        info = self.state.info
        assert info is not None, "open() returns after the welcome"
        return info

    @property
    def generation(self) -> str:
        """The generation of the engine process, different for each process; "" while there is none."""
        return self.state.generation

    def submit(self, request: ValidRequest, into: EventQueue | None = None) -> RemoteStream:
        """Run ``request``; see ``Engine``. ``into`` replaces the queue of events, for a reader that is not a thread."""
        events = event_buffer(request, self._queue() if into is None else into)
        handle = RequestHandle(self.io)  # commands reference it, not the stream, so that an unused stream is collected
        stream = RemoteStream(handle, events, len(request.sequences), owner=self)

        def start(state: ClientState) -> None:
            handle.number = state.submit(request, events)

        try:
            self._ready()
            handle.io = self.io
            if not self.post(start):
                events.put(Failed(ShuttingDown.kind, "the engine was closed"))
        except ServingError as error:  # a forked child that finds no engine
            events.put(Failed(error.kind, error.message, None, error.retry_after))
        weakref.finalize(stream, handle.abort).atexit = False
        return stream

    def hand_over(self, stream: EventStream, other: Engine) -> bool:
        """See ``Engine``; ``other`` has the same model."""
        if not isinstance(stream, RemoteStream) or not isinstance(other, RemoteEngine):
            return False
        stream.owner = other
        handle, ours, theirs = stream.handle, self.io, other.io

        def release(state: ClientState) -> None:
            running = state.release(handle.number) if handle.io is ours else None
            if running is None:
                return

            def adopt(state: ClientState) -> None:
                handle.number = state.adopt(running)

            if not other.post(adopt):
                running.fail(ShuttingDown("the engine was closed"))
            handle.io = theirs  # from now on commands go there; they run after ``adopt``

        return self.post(release)

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        path = path if parse_place(path)[0] else os.path.abspath(path)
        return self._call(lambda state, call: state.load_adapter(name, path, replace, pinned, call))[0]

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        self._call(lambda state, call: state.unload_adapter(name, at_once, call))

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._call(lambda state, call: state.list_adapters(call))

    def read_journal(self, name: str = "", position: int = 0) -> JournalPage:
        """Ask an engine on another host for its journals of this client's store (``protocol.ReadJournal``).

        Raises ``ServingError``, also if the engine does not answer soon.
        """
        found: JournalPage = self._ask(lambda state, call: state.read_journal(name, position, call), JOURNAL_SECONDS)
        return found

    def _call(self, ask: Callable[[ClientState, _Call], None]) -> tuple[AdapterInfo, ...]:
        found: tuple[AdapterInfo, ...] = self._ask(ask, None)
        return found

    def _ask(self, ask: Callable[[ClientState, _Call], None], timeout: float | None) -> Any:
        call = _Call(self._queue())
        if not self.post(lambda state: ask(state, call)):
            raise ShuttingDown("the engine was closed")
        return call.wait(timeout)

    def health(self) -> Health:
        """Return the health from the last heartbeat, without asking the engine.

        The status is "starting" while the client looks for an engine or starts it again.
        """
        if self._closed or self.io.stopping:
            return Health(status="dead")
        health, here = self.state.health, self.state.welcome
        status = "stalled" if self.io.stalled else health.status if here else "starting"
        nothing = {} if here else AWAY
        return msgspec.structs.replace(health, status=status, last_step_age=self.io.step_age, **nothing)

    def process_health(self) -> dict[str, Health]:
        """Return the last heartbeat of each engine process that this client was connected to, by generation."""
        return self.state.last_health

    def close(self) -> None:
        """Leave the engine, which ends soon after its last client. Closing twice is harmless."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._lock:
            self._closed = True
            self._finalizer.detach()
            self.io.stop()
        self._join()
        _open_clients.discard(self)

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _main(io: IoLoop, started: Any) -> None:
    """Run the loop. ``started`` gets None when the engine was found, or the error that prevented it."""
    try:
        io.open()
    except BaseException as error:
        io.close()
        started.put(error)
        return
    started.put(None)
    io.run()


def _leave(io: IoLoop, owner: Any, pid: int) -> None:
    """End the loop of an unreferenced client. The garbage collector calls it on any thread, so it must not wait."""
    if pid == os.getpid():
        _leaving.add(owner)
        io.stop()


_open_clients: weakref.WeakSet[RemoteEngine] = weakref.WeakSet()
_leaving: weakref.WeakSet[Any] = weakref.WeakSet()  # loops of clients that are gone


def _close_all() -> None:
    for client in list(_open_clients):
        with contextlib.suppress(Exception):
            client.close()
    for owner in list(_leaving):
        with contextlib.suppress(Exception):
            owner.join(JOIN_SECONDS)


def _forked() -> None:
    for client in list(_open_clients):
        client.forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)


def connect(
    bundle: Bundle,
    settings: EngineSettings | None = None,
    *,
    state_dir: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> RemoteEngine:
    """Return a client of the engine process of this model and settings, and start the process if none runs.

    ``state_dir`` replaces the runtime directory, ``progress`` is called with "loading" and "ready", ``options`` are
    those of ``Launcher`` and ``keep`` of ``IoLoop``. Raises ``PackagingError`` if the model cannot be loaded, and
    ``EngineDied`` if the process ended while it loaded or took too long.
    """
    settings = settings or EngineSettings()
    keep = bool(options.pop("keep", False))

    def make() -> Launcher:
        return Launcher(bundle, settings, state_dir=state_dir, progress=progress, **options)

    return RemoteEngine(make, stall_timeout=settings.stall_timeout, keep=keep)


def attach(
    address: str,
    *,
    key_file: str | None = None,
    timeout: float = 60.0,
    stall_timeout: float = 60.0,
    content_hash: str = "",
) -> RemoteEngine:
    """Return a client of an engine that is started elsewhere.

    ``address`` is the engine's state directory, or ``tcp://host:port`` with ``key_file``. The client finds the engine's
    successor by itself, even while no request runs; a request that waits for it longer than ``timeout`` seconds fails
    with ``Unavailable``. ``attach`` itself raises ``Unavailable`` if there is no engine within ``timeout`` seconds, if
    the engine does not know the key, or if its model differs from ``content_hash`` (when given).
    """

    def make() -> Attacher:
        return Attacher(address, key_file=key_file, timeout=timeout)

    return RemoteEngine(
        make,
        stall_timeout=stall_timeout,
        keep=True,
        content_hash=content_hash,
        timeout=timeout,
        away_timeout=timeout,
    )
