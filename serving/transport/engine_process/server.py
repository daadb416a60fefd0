"""The engine process's loop: take messages, step, send events, look after clients. All on the model's thread.

A client on this host is alive while it holds its lock file (``state_directory``), a client on another host while it
pings. Clients on other hosts use a separate socket, which identifies them no matter what they claim: the only paths on
this host that they may name are adapters below ``adapter_dirs``. The journals of their requests are kept here, and they
read them over their connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import zmq

from ...interface.engine import Core, EngineInfo, EngineOutput, Health
from ...interface.errors import (
    Aborted,
    InternalError,
    InvalidField,
    PackagingError,
    PermissionDenied,
    ServingError,
    Unavailable,
)
from ...interface.events import Event, Failed, Logits, is_terminal
from ...interface.request import ValidRequest
from ...interface.settings import EngineSettings
from ...model_files import downloads
from ...model_files.adapter_contents import content_of
from ...system.journal import STORE_ID, journals_of
from .. import protocol as m
from ..adapter_places import ContentRequests, parse_place
from ..discovery.state_directory import RuntimeAdapter, StateDirectory
from ..wake_pipe import WakePipe
from .counters import CounterWriter
from .drain import Drain
from .journal import MeteredRequests
from .journal_pages import read_page
from .standby import WarmStandby

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # seconds between heartbeats and between checks of the clients' locks
SILENCE_SECONDS = 30.0  # seconds without a ping after which a client on another host counts as dead
EVENTS, READABLE, SNDMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.SNDMORE)  # plain ints cost less per step
LOCAL, REMOTE = b"l", b"r"  # prefixes of a client's identity, which is only unique within its socket
FRAME_BYTES = 8 * 2**20  # bytes of logits after which a frame is sent
MESSAGES_PER_TURN = 256  # messages taken before the next step, so that a flood of messages cannot delay it forever


_Client: TypeAlias = tuple[bytes, int]
"""(identity of the connection, number of the request on it). The core returns it with the request's events."""


class _Open:
    """A request that a client waits for; ``left`` is how many of its sequences have not ended."""

    __slots__ = ("left", "request_id")

    def __init__(self, request_id: str, left: int) -> None:
        self.request_id, self.left = request_id, left


class _Peer:
    """A connected client and the requests that it still waits for, by the client's numbers."""

    __slots__ = ("client_id", "counts", "is_local", "journal", "name", "open", "seen")

    def __init__(self, hello: m.Hello, *, is_local: bool, journals: str) -> None:
        """Use only the names of a client that connects over TCP, and of its store, whose journals are below
        ``journals``; its statements about this host are ignored."""
        self.name, self.is_local = hello.name, is_local
        self.client_id = hello.client_id if is_local else ""
        self.journal, self.counts = (hello.journal, hello.counts) if self.client_id else ("", "")
        if not is_local and journals and STORE_ID.fullmatch(hello.store):
            self.journal = str(journals_of(Path(journals), hello.store))
        self.open: dict[int, _Open] = {}
        self.seen = time.monotonic()


class EngineServer:
    """The server of an engine. ``socket`` is a bound ROUTER for clients on this host, ``remote`` one for other hosts.

    ``run`` returns when the last client has been gone for ``idle_timeout``, after ``leave`` or ``stop`` was called, or
    when clients no longer find this engine (``in_place`` returns False) because its directory was removed."""

    def __init__(
        self,
        core: Core,
        settings: EngineSettings,
        state: StateDirectory,
        socket: Any,
        info: EngineInfo,
        generation: str,
        *,
        remote: Any = None,
        adapter_dirs: Sequence[str] = (),
        adapter_requests: str = "",
        journals: str = "",
        drain_timeout: float = 0.0,
        in_place: Callable[[], bool] = lambda: True,
        standby: WarmStandby | None = None,
    ) -> None:
        self.sockets: dict[bytes, Any] = {LOCAL: socket} if remote is None else {LOCAL: socket, REMOTE: remote}
        self.poller = zmq.Poller()
        for one in self.sockets.values():
            self.poller.register(one, zmq.POLLIN)
        self._pipe = WakePipe()
        self.poller.register(self._pipe.fd, zmq.POLLIN)
        core.on_work(self._pipe.wake)
        self._contents = ContentRequests(adapter_requests) if adapter_requests else None
        self._adapter_dirs = [os.path.realpath(path) for path in adapter_dirs]
        self._journals = journals
        self.core, self.settings, self.state, self.socket = core, settings, state, socket
        self.info, self.generation = info, generation
        self.peers: dict[bytes, _Peer] = {}
        self.clients: dict[str, _Client] = {}  # by the ids of the requests that peers wait for
        self._drain = Drain(drain_timeout)
        self._in_place, self._standby = in_place, standby
        self._last_tick = 0.0
        self._left_at = time.monotonic()
        self._is_leaving = False
        self._runtime_adapters: dict[str, RuntimeAdapter] = {}
        self._metered = MeteredRequests(generation)
        self._counters = CounterWriter(generation)

    def leave(self) -> None:
        """Ask the loop to end as soon as there is no client; the second call is ``stop``. Safe in a signal handler."""
        if self._is_leaving:
            self.stop()
        self._is_leaving = True
        self._last_tick = 0.0

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the loop to end when all requests have ended or the drain time is over; safe in a signal handler."""
        self._drain.begin(at_once=at_once)
        self._last_tick = 0.0  # so that the clients get a heartbeat at once

    def run(self) -> None:
        """Serve until the engine ends, and remove the state directory.

        Raises what a step raises; the clients then start another engine.
        """
        while not (self._drain.has_begun and self._drain.over(any(peer.open for peer in self.peers.values()))):
            self.take()
            if self.core.has_work():
                outputs = self.core.step()
                health = self.core.health()
                self._counters.write(health)
                self.send_events(outputs, health.steps)
            if time.monotonic() - self._last_tick >= TICK_SECONDS and self._tick():
                return
        self._shut_down()

    # messages in

    def take(self) -> None:
        if not self.core.has_work():
            if not self.poller.poll(int(TICK_SECONDS * 500)):
                return
            self._pipe.drain()
        for side, socket in self.sockets.items():
            if socket.getsockopt(EVENTS) & READABLE:  # costs less per step than a poll and an exception
                self._take_from(side, socket)

    def _take_from(self, side: bytes, socket: Any) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                name, frame = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue  # a wrong number of frames: not a message of our protocol
            identity = side + name
            try:
                self.handle(identity, m.decode_for_engine(frame))
            except msgspec.DecodeError as error:
                logger.warning("an unreadable message: %s", error)
                self._send(identity, m.Rejected("a message could not be read"))

    def handle(self, identity: bytes, message: m.ToEngine) -> None:
        if isinstance(message, m.Hello):
            self._greet(identity, message)
            return
        peer = self.peers.get(identity)
        if peer is None:
            self._send(identity, m.Rejected("expected Hello as the first message"))
            return
        peer.seen = time.monotonic()
        match message:
            case m.Submit(number, request, continues, time_left):
                if time_left is not None and not peer.client_id:  # its deadline is in the other host's clock
                    request = msgspec.structs.replace(request, deadline=time.monotonic() + time_left)
                self._submit((identity, number), peer, request, continues)
            case m.Abort(number):
                self._abort(peer, number)
            case m.Finish(number, index):
                if number in peer.open:
                    self.core.finish(peer.open[number].request_id, index)
            case m.Goodbye():
                self._drop(identity)
            case m.ReadJournal():
                self._send(identity, read_page(peer.journal, message))
            case m.LoadAdapter() | m.UnloadAdapter() | m.ListAdapters():
                self._send(identity, self._call(peer, message))
            case _:
                pass

    def _greet(self, identity: bytes, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL_VERSION:
            self._send(identity, m.Rejected(f"this engine speaks protocol {m.PROTOCOL_VERSION}, not {hello.protocol}"))
            return
        is_local = identity.startswith(LOCAL)
        if hello.name:  # it may be back after its connection broke: it submits again what it still wants
            named = ((known, peer) for known, peer in self.peers.items() if peer.name == hello.name)
            for known in [known for known, peer in named if peer.is_local == is_local]:
                self._drop(known)
        self.peers[identity] = _Peer(hello, is_local=is_local, journals=self._journals)
        self._counters.keep({peer.counts for peer in self.peers.values()}, self.core.health())
        self._send(identity, m.Welcome(self.generation, self.info, self._health()))

    def _submit(self, client: _Client, peer: _Peer, request: ValidRequest, continues: bool) -> None:
        for earlier in (client, self.clients.get(request.request_id)):
            if earlier is not None:
                self._replace(earlier)
        peer.open[client[1]] = _Open(request.request_id, len(request.sequences))
        self.clients[request.request_id] = client
        self._metered.begin(client, request, peer.journal)
        try:
            self.core.add(request, client, continues=continues)
        except Exception as error:
            logger.exception("request %s", request.request_id)
            shown = error if isinstance(error, ServingError) else InternalError("the engine could not take the request")
            failed = Failed(shown.kind, shown.message, shown.param)
            self.send_events([(client, request.request_id, failed)], self.core.health().steps)

    def _replace(self, client: _Client) -> None:
        """End the earlier run of a request that is submitted again.

        A request runs only once; one that was handed over may arrive from its new client before the old one's abort.
        """
        identity, number = client
        peer = self.peers.get(identity)
        if peer is not None and number in peer.open:
            self._abort(peer, number)
            aborted = Failed(Aborted.kind, "the request was submitted again")
            self._send(identity, m.Events(self.core.health().steps, ((number, aborted),)))

    def _abort(self, peer: _Peer, number: int) -> None:
        if number in peer.open:
            self.core.abort(self._close(peer, number))

    def _close(self, peer: _Peer, number: int) -> str:
        """Remove a request that its client no longer waits for, and return its id."""
        request_id = peer.open.pop(number).request_id
        self.clients.pop(request_id, None)
        return request_id

    def _call(self, peer: _Peer, message: m.LoadAdapter | m.UnloadAdapter | m.ListAdapters) -> m.Answer:
        try:
            match message:
                case m.LoadAdapter(call, name, path, replace, pinned):
                    path = path if peer.is_local else self._place_of(path)
                    adapter = self.core.load_adapter(name, path, replace=replace, pinned=pinned)
                    self._remember(name, RuntimeAdapter(path=path, pinned=pinned))
                    return m.Answer(call, (adapter,))
                case m.UnloadAdapter(call, name, at_once):
                    self.core.unload_adapter(name, at_once=at_once)
                    self._remember(name, None)
                    return m.Answer(call)
            return m.Answer(message.call, self.core.adapters())
        except ServingError as error:
            return m.Answer(message.call, (), error.kind, error.message, error.param)
        except Exception:
            logger.exception("adapter call")
            return m.Answer(message.call, (), "internal", "the call failed in the engine; see its log")

    def _place_of(self, given: str) -> str:
        """Return the directory of an adapter that a client on another host names.

        Raises ``Unavailable`` while this host fetches its content, ``PermissionDenied``, and ``InvalidField`` if the
        directory here has another content.
        """
        content_hash, path = parse_place(given)
        if content_hash and self._contents is not None:
            found, problem = self._contents.find(content_hash)
            if not found:
                why = f"; the last attempt failed: {problem}" if problem else ""
                raise Unavailable(f"adapter content {content_hash[:12]} is being fetched from the database{why}")
            return found
        real = self._allowed(path)
        if content_hash and not self._has_content(real, content_hash):
            allowed = f"a directory that has, on the engine's host, the content {content_hash[:12]} that was loaded"
            raise InvalidField("adapter", path, allowed)
        return real

    def _has_content(self, path: str, content_hash: str) -> bool:
        try:
            return content_of(path).content_hash == content_hash
        except PackagingError as error:
            raise InvalidField("adapter", path, f"a directory with an adapter: {error}") from None

    def _allowed(self, path: str) -> str:
        """Return the real path of an adapter that a client on another host names.

        Raises ``PermissionDenied`` outside ``adapter_dirs``; the error does not reveal whether the path exists.
        """
        real = os.path.realpath(path)
        if not any(real != root and os.path.commonpath((root, real)) == root for root in self._adapter_dirs):
            below = ", ".join(self._adapter_dirs) or "none; mlflow-llm engine --adapter-dir allows one"
            raise PermissionDenied(f"adapter: an engine of another host loads from its own directories: {below}")
        return real

    def _remember(self, name: str, adapter: RuntimeAdapter | None) -> None:
        """Record the adapters loaded at run time for a successor, in case this process is killed."""
        before = self._runtime_adapters.pop(name, None)
        if adapter is not None:
            self._runtime_adapters[name] = adapter
        if before is not None and before.path not in {one.path for one in self._runtime_adapters.values()}:
            downloads.release_paths([before.path])
        self.state.write_json("adapters.json", self._runtime_adapters)

    def reload_adapters(self, adapters: dict[str, RuntimeAdapter]) -> None:
        """Load the adapters of a killed predecessor again; one that cannot be loaded is logged and left out."""
        for name, adapter in adapters.items():
            try:
                self.core.load_adapter(name, adapter.path, pinned=adapter.pinned)
                self._runtime_adapters[name] = adapter
            except Exception:
                logger.exception("adapter %s cannot be loaded again", name)

    # events out

    def send_events(self, outputs: list[EngineOutput], steps: int) -> None:
        if not outputs:
            return
        self._metered.count(outputs)
        by_peer: dict[bytes, list[tuple[int, Event]]] = {}
        for client, _, event in outputs:
            identity, number = cast(_Client, client)
            peer = self.peers.get(identity)
            if peer is None or (request := peer.open.get(number)) is None:
                continue  # the client is gone or has aborted the request
            if is_terminal(event):
                request.left = 0 if isinstance(event, Failed) else request.left - 1
                if not request.left:
                    self._close(peer, number)
            items = by_peer.setdefault(identity, [])
            items.append((number, event))
            if isinstance(event, Logits) and sum(len(e.data) for _, e in items if isinstance(e, Logits)) >= FRAME_BYTES:
                self._send(identity, m.Events(steps, tuple(by_peer.pop(identity))))
        for identity, items in by_peer.items():
            self._send(identity, m.Events(steps, tuple(items)))

    def _send(self, identity: bytes, message: m.ToClient) -> None:
        socket = self.sockets[identity[:1]]
        socket.send(identity[1:], SNDMORE)
        socket.send(m.encode(message))

    # clients and shutdown

    def _tick(self) -> bool:
        """Send heartbeats, drop dead clients, end when idle. Return True if the loop has to end."""
        now = self._last_tick = time.monotonic()
        self._metered.write_late()
        if not self._in_place():
            logger.warning("%s was removed: its engine ends", self.state.path)
            self.core.close()  # requests continue in the next engine, so their end is not sent
            self._send_away("the engine's directory was removed")
            return True
        if self._standby is not None:
            self._standby.tick()
        alive = self.state.live_clients()
        for identity, peer in list(self.peers.items()):
            gone = peer.client_id not in alive if peer.client_id else now - peer.seen > SILENCE_SECONDS
            if gone:
                logger.info("client %s disconnected with %d requests", peer.client_id, len(peer.open))
                self._drop(identity)
        beat = m.Heartbeat(self._health())
        for identity in self.peers:
            self._send(identity, beat)
        if alive or self.peers:
            self._left_at = now
        idle_timeout = 0.0 if self._is_leaving else self.settings.idle_timeout
        return now - self._left_at > idle_timeout and self._end_if_unused()

    def _health(self) -> Health:
        health = self.core.health()
        if self._standby is not None:
            health = msgspec.structs.replace(health, num_standbys=self._standby.num_ready)
        return msgspec.structs.replace(health, status="draining") if self._drain.under_way else health

    def _drop(self, identity: bytes) -> None:
        peer = self.peers.pop(identity, None)
        if peer is not None:
            for number in list(peer.open):
                self._abort(peer, number)

    def _end_if_unused(self) -> bool:
        lock = self.state.try_lock()
        if lock is None:
            return False
        if self.state.live_clients():
            lock.release()
            return False
        logger.info("no client is left")
        self.core.close()
        self._metered.close()
        self.state.remove(lock)
        return True

    def _shut_down(self) -> None:
        """Shut down while holding the lock, so that a client that is sent away does not find this engine again."""
        lock = self.state.lock(timeout=10.0)
        self.send_events(self.core.close(), self.core.health().steps)
        self._metered.close()
        self._send_away("the engine was asked to end")
        self.state.remove(lock)

    def _send_away(self, why: str) -> None:
        for identity in self.peers:
            self._send(identity, m.Closing(why))
