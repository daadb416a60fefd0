"""An engine that cannot be found, started or reached for a while: its clients and its supervisor go on afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import threading
import time

import msgspec
import pytest
from transport_place import SETTINGS, by_sequence, completion, eventually

from mlflow_llm.serving.interface.errors import EngineDied, PackagingError, Unavailable
from mlflow_llm.serving.system.file_locks import is_held, try_acquire
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import attach
from mlflow_llm.serving.transport.client import reconnect
from mlflow_llm.serving.transport.client.reconnect import MAX_PAUSE, Reconnect
from mlflow_llm.serving.transport.discovery import state_directory
from mlflow_llm.serving.transport.discovery.launcher import Launcher
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory

LASTING = msgspec.structs.replace(SETTINGS, idle_timeout=600.0)


def undisturbed(bundle, request):
    return by_sequence(InstantEngine(bundle).submit(request))


# errors of the operating system


def test_a_stream_outlives_a_full_disk(place, make_bundle, full_disk):
    """A stream loses no token if its engine can be restarted only once the disk has room again."""
    bundle, request = make_bundle(step_delay=0.004), completion(max_tokens=100)
    with place.connect(bundle) as engine:
        stream = engine.submit(request)
        first = next(stream)
        full_disk(2)
        os.kill(engine.info.pid, signal.SIGKILL)
        assert by_sequence([first, *stream]) == undisturbed(bundle, request)
    place.assert_clean()


def test_a_runtime_directory_that_goes_while_it_is_made(place, monkeypatch):
    """Making a runtime directory succeeds even if its last user removes it meanwhile."""
    real, left = state_directory.check_private, [1, 2, 3]

    def check_private(path, *kind):
        if left:
            left.pop()
            os.rmdir(path)
        real(path, *kind)

    monkeypatch.setattr(state_directory, "check_private", check_private)
    state = StateDirectory(place.runtime, "k" * 16)
    state.lock().release(unlink=True)
    assert not left
    os.rmdir(place.runtime)


def test_probing_a_lock_delays_a_start_but_does_not_fail_it(place, make_bundle, monkeypatch):
    """A process that probes a free lock at the moment of a start delays the start only."""
    looking, real = [], Launcher.start

    def start(self):
        looking.append(os.open(self.state.engine_lock_path, os.O_RDWR | os.O_CREAT, 0o600))
        fcntl.flock(looking[0], fcntl.LOCK_SH)
        return real(self)

    def sleep(seconds):
        while looking:
            os.close(looking.pop())
        time.sleep(seconds)

    monkeypatch.setattr(Launcher, "start", start)
    with place.connect(make_bundle(), sleep=sleep) as engine:
        assert engine.health().status == "ready"
    place.assert_clean()


def test_a_lock_counts_as_held_without_file_descriptors(tmp_path):
    """If no file can be opened a lock counts as held; a missing lock file does not."""
    path = str(tmp_path / "lock")
    lock = try_acquire(path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        held = is_held(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert held
    lock.release(unlink=True)
    assert not is_held(path)


def test_a_search_may_fail_for_ever(monkeypatch):
    """Pauses stay finite after thousands of failures, and system errors end requests only if they last."""
    said = []
    found = Reconnect(said.append)
    refused = OSError(errno.ENOSPC, "No space left on device")
    assert found.failed(refused) is None
    assert isinstance(found.failed(PackagingError("no weights")), EngineDied)
    for _ in range(5000):
        found.failed(Unavailable("away"))
    assert found.pause == MAX_PAUSE
    monkeypatch.setattr(reconnect, "TRANSIENT_SECONDS", 0.0)
    assert isinstance(found.failed(refused), EngineDied)
    found.found()
    assert said[:2] == [str(refused), "no weights"]
    assert said[-1] == ""


# an engine that stood still


def test_an_engine_that_only_one_client_gave_up_is_taken_again(place, make_bundle):
    """A client that alone took its engine for hung returns to it, and its stream continues there."""
    bundle, request = make_bundle(step_delay=0.01), completion(max_tokens=400)
    with place.connect(bundle, LASTING, keep=True) as owner:
        pid = owner.info.pid
        with attach(owner.io.finder.state.path, timeout=240.0, stall_timeout=2.0) as worker:
            stream = worker.submit(request)
            first = next(stream)
            os.kill(pid, signal.SIGSTOP)
            assert eventually(lambda: worker.health().status == "stalled")
            os.kill(pid, signal.SIGCONT)
            assert by_sequence([first, *stream]) == undisturbed(bundle, request)
            assert worker.health().status == "ready"
            assert worker.info.pid == owner.info.pid == pid
    # its engine has a long idle_timeout: nothing but a request to end is to be waited for
    os.kill(pid, signal.SIGTERM)
    place.assert_clean()


def test_a_hanging_engine_is_waited_for_like_a_dead_one(place, make_bundle):
    """If the engine still does not answer, waiting requests fail in time, and later ones find it once it does."""
    bundle = make_bundle(step_delay=0.004)
    with place.connect(bundle, LASTING, keep=True) as owner:
        pid = owner.info.pid
        with attach(owner.io.finder.state.path, timeout=4.0, stall_timeout=2.0) as worker:
            stream = worker.submit(completion(max_tokens=10**5))
            next(stream)
            os.kill(pid, signal.SIGSTOP)
            try:
                *_, last = stream
            finally:
                os.kill(pid, signal.SIGCONT)
            assert last.kind == "unavailable"
            assert eventually(lambda: worker.health().status == "ready")
            request = completion(max_tokens=5)
            assert by_sequence(worker.submit(request)) == undisturbed(bundle, request)
    os.kill(pid, signal.SIGTERM)
    place.assert_clean()


# handing over while the engine is away


@pytest.fixture
def pair(place, make_bundle):
    """Return clients of two replicas, and the bundle; the first, with pid ``pair[0].info.pid``, has no supervisor."""
    bundle = make_bundle(step_delay=0.004)
    owners = [place.connect(bundle, replica=i) for i in range(2)]
    one, two = (attach(owner.io.finder.state.path, timeout=240.0) for owner in owners)
    owners[0].close()
    yield one, two, bundle
    for client in (one, two, owners[1]):
        client.close()
    place.assert_clean()


def test_a_stream_is_handed_over_while_its_engine_is_looked_for(pair):
    """A stream can be handed over to another replica while the search for its engine takes long."""
    one, two, bundle = pair
    request, looking, real = completion(max_tokens=200), threading.Event(), one.io.finder.find

    def find(stalled, cancelled):
        looking.set()
        return real(stalled, cancelled)

    one.io.finder.find = find
    stream = one.submit(request)
    first = next(stream)
    os.kill(one.info.pid, signal.SIGKILL)
    assert looking.wait(240)
    one.hand_over(stream, two)
    assert by_sequence([first, *stream]) == undisturbed(bundle, request)
    assert one.health().status == "starting"


def test_a_stream_is_handed_over_as_the_search_for_its_engine_fails(pair):
    """A stream handed over during a failing search for its engine is not failed with the waiting requests."""
    one, two, bundle = pair
    request, waiting = completion(max_tokens=200), completion("w", max_tokens=10**5)

    def find(stalled, cancelled):
        one.io.finder.find = real
        one.hand_over(stream, two)
        raise Unavailable("the engine is not running")

    real, one.io.finder.find = one.io.finder.find, find
    stream, other = one.submit(request), one.submit(waiting)
    first = next(stream)
    next(other)
    os.kill(one.info.pid, signal.SIGKILL)
    assert by_sequence([first, *stream]) == undisturbed(bundle, request)
    *_, last = other
    assert last.kind == "unavailable"
