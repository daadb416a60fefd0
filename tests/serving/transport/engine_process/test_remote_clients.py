"""Clients on other hosts: TCP with a key that both sides share."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from serving_process import free_port
from transport_place import SETTINGS, completion, eventually, timeless

from mlflow_llm.serving.interface.errors import PackagingError, Unavailable
from mlflow_llm.serving.interface.events import Finished
from mlflow_llm.serving.model_files.adapter_contents import FILES, content_of
from mlflow_llm.serving.testing.instant_core import InstantCore
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import attach, protocol
from mlflow_llm.serving.transport.adapter_places import place_elsewhere
from mlflow_llm.serving.transport.auth import secure_client
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory
from mlflow_llm.serving.transport.engine_process import server


@pytest.fixture
def key(tmp_path):
    """Return the path of a new key file."""
    return write_key(tmp_path / "key")


def write_key(path):
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def undisturbed(bundle, request):
    """Return the events of an undisturbed engine for ``request``, without timings."""
    local = InstantEngine(bundle)
    local.core.model = msgspec.structs.replace(local.core.model, step_delay=0.0)
    return timeless(local.submit(request))


class Wire:
    """A loopback port that forwards bytes to ``address`` until it is cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        """Break the current connections; new ones are accepted."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):  # its peer was faster
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread that accepts
        self._listener.close()
        self.cut()


def test_a_wrong_key_is_refused(place, make_bundle, key, tmp_path):
    """A client with another key gets an error that says so in time; one with the right key works all the while."""
    address = free_address()
    with place.connect(make_bundle(), listen=address, key_file=key), attach(address, key_file=key) as right:
        with pytest.raises(Unavailable, match="another key"):
            attach(address, key_file=write_key(tmp_path / "other"), timeout=240)
        assert timeless(right.submit(completion()))
    place.assert_clean()


@pytest.mark.parametrize("other", [None, "other"])
def test_no_word_without_the_key(place, make_bundle, key, tmp_path, other):
    """An engine does not answer a socket that speaks its protocol in the clear or with another key."""
    address = free_address()
    context = zmq.Context()
    with place.connect(make_bundle(), listen=address, key_file=key):
        stranger = context.socket(zmq.DEALER)
        if other is not None:
            secure_client(stranger, b"k" * 32)
        stranger.connect(address)
        stranger.send(protocol.encode(protocol.Hello("")))
        assert not stranger.poll(1000)
        stranger.close(0)
    context.term()
    place.assert_clean()


def test_bad_key_files_are_refused(tmp_path):
    """A key that is missing, short or open to others is refused before anything is connected."""
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_text("short")
    open_to_all = write_key(tmp_path / "open")
    os.chmod(open_to_all, 0o644)
    for path, reason in ((None, "key_file"), (str(tmp_path / "none"), "No such"), (str(short), "at least")):
        with pytest.raises(PackagingError, match=reason):
            attach("tcp://127.0.0.1:1", key_file=path)
    with pytest.raises(PackagingError, match="chmod"):
        attach("tcp://127.0.0.1:1", key_file=open_to_all)


def test_no_engine_at_the_address(key):
    """If nothing listens at the address, a client gets an error after its timeout."""
    with pytest.raises(Unavailable, match="no engine answered"):
        attach(free_address(), key_file=key, timeout=1.0)


def test_a_stream_between_hosts_outlives_its_engine(place, make_bundle, key):
    """After kill -9 the engine's successor listens at the same address, and the stream continues undisturbed."""
    address, bundle = free_address(), make_bundle(step_delay=0.005)
    request = completion(max_tokens=200)
    with (
        place.connect(bundle, listen=address, key_file=key, keep=True) as owner,
        attach(address, key_file=key) as remote,
    ):
        stream = remote.submit(request)
        found = [next(stream) for _ in range(20)]
        os.kill(owner.info.pid, signal.SIGKILL)
        assert timeless([*found, *stream]) == undisturbed(bundle, request)
    place.assert_clean()


def test_a_broken_connection(place, make_bundle, key):
    """After a connection breaks twice each stream continues, and no sequence is left in the engine."""
    address, bundle = free_address(), make_bundle(step_delay=0.01)
    requests = [completion(f"r{i}", max_tokens=150, prompt=(i, 1)) for i in range(3)]
    with contextlib.closing(Wire(address)) as wire:
        with place.connect(bundle, listen=address, key_file=key) as local, attach(wire.address, key_file=key) as remote:
            streams = [remote.submit(request) for request in requests]
            found = [[next(stream)] for stream in streams]
            for _ in range(2):
                wire.cut()
                for events, stream in zip(found, streams, strict=True):
                    events += [next(stream) for _ in range(20)]
            for request, events, stream in zip(requests, found, streams, strict=True):
                assert timeless([*events, *stream]) == undisturbed(bundle, request)
            assert eventually(lambda: local.health().num_running == 0)
        place.assert_clean()  # before the wire is closed: the goodbye is on its way


def test_a_deadline_is_counted_where_the_engine_is(place, make_bundle):
    """A remote client's deadline is set from the time left, a local one's from the shared monotonic clock."""
    core = InstantCore(make_bundle(max_model_len=10**6), SETTINGS)
    state = StateDirectory(place.runtime, "k" * 16)
    state.lock().release()
    state.prepare()
    taken = {}
    core.add = lambda request, client, **_: taken.update({request.request_id: request})
    engine = server.EngineServer(core, SETTINGS, state, _Deaf(), core.info, "generation")
    for client_id, name in (("", "far"), ("near", "near")):
        identity = server.LOCAL + name.encode()
        engine.handle(identity, protocol.Hello(client_id, name=name))
        request = msgspec.structs.replace(completion(name, max_tokens=5), deadline=3.0)
        engine.handle(identity, protocol.Submit(1, request, time_left=600.0))
    assert 500 < taken["far"].deadline - time.monotonic() <= 600
    assert taken["near"].deadline == 3.0


class _Deaf:
    def send(self, frame, flags=0):
        """Drop the message, since nobody listens."""


def test_a_silent_client_is_gone(place, make_bundle, monkeypatch):
    """A remote client that is silent for long loses its sequences, and one that pings keeps them."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(server, "time", clock)
    core = InstantCore(make_bundle(step_delay=0.01, max_model_len=10**6), SETTINGS)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("inproc://engine")
    state = StateDirectory(place.runtime, "k" * 16)
    state.lock().release()
    state.prepare()
    engine = server.EngineServer(core, SETTINGS, state, router, core.info, "generation")
    loop = threading.Thread(target=engine.run)
    clients = []
    for name in ("silent", "alive"):
        client = context.socket(zmq.DEALER)
        client.connect("inproc://engine")
        client.send(protocol.encode(protocol.Hello("", name=name)))
        client.send(protocol.encode(protocol.Submit(1, completion(name, max_tokens=10**5))))
        clients.append(client)
    loop.start()
    assert eventually(lambda: core.health().num_running == 2)
    peers = {peer.name: peer for peer in engine.peers.values()}
    for _ in range(int(server.SILENCE_SECONDS) + 2):
        clock.now += 1.0
        clients[1].send(protocol.encode(protocol.Ping()))
        assert eventually(lambda: peers["alive"].seen == clock.now)
    assert eventually(lambda: core.health().num_running == 1)
    assert [peer.name for peer in engine.peers.values()] == ["alive"]
    engine.stop()
    loop.join(240)
    for socket_ in (*clients, router):
        socket_.close(0)
    context.term()


def test_a_key_opens_no_files(place, make_bundle, key, tmp_path):
    """A remote client with the key that claims to be local can name no journal, and loads adapters only from allowed
    directories, after resolving links and dots.
    """
    address, journal = free_address(), tmp_path / "journal"
    (tmp_path / "allowed/own").mkdir(parents=True)
    (tmp_path / "other/own").mkdir(parents=True)
    (tmp_path / "allowed/link").symlink_to(tmp_path / "other")
    allowed = str(tmp_path / "allowed")
    context = zmq.Context()
    with place.connect(make_bundle(), listen=address, key_file=key, adapter_dirs=(allowed,)) as local:
        stranger = context.socket(zmq.DEALER)
        with open(key, "rb") as file:
            secure_client(stranger, file.read().strip())
        stranger.connect(address)

        def ask(message, kind):
            stranger.send(protocol.encode(message))
            while True:
                assert stranger.poll(60_000)
                if isinstance(found := protocol.decode_for_client(stranger.recv()), kind):
                    return found

        ask(protocol.Hello("x" * 32, journal=str(journal)), protocol.Welcome)
        stranger.send(protocol.encode(protocol.Submit(1, completion("metered", max_tokens=5))))
        while not isinstance(ask(protocol.Ping(), protocol.Events).items[-1][1], Finished):
            pass
        assert not journal.exists()
        for number, path in enumerate(("/etc", f"{allowed}/../other/own", f"{allowed}/link/own", allowed, "", "own")):
            answer = ask(protocol.LoadAdapter(number, "own", path), protocol.Answer)
            assert (answer.kind, answer.call) == ("permission_denied", number)
        assert ask(protocol.LoadAdapter(9, "own", f"{allowed}/own"), protocol.Answer).kind is None
        for name in FILES:
            (tmp_path / "allowed/own" / name).write_text("{}")
        own, other = content_of(f"{allowed}/own").content_hash, "0" * 64
        given = (place_elsewhere(own, f"{allowed}/own"), place_elsewhere(other, f"{allowed}/own"), f"sha256:{own}:/etc")
        answers = [ask(protocol.LoadAdapter(10, "own", one, True), protocol.Answer) for one in given]
        assert [one.kind for one in answers] == [None, "invalid_field", "permission_denied"]
        assert local.load_adapter("near", str(tmp_path / "other/own")).name == "near"
        stranger.close(0)
    context.term()
    place.assert_clean()
