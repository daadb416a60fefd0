"""Engines run by a supervisor and used by attached clients: threads, greenlets, other hosts."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import msgspec
import pytest
from transport_place import CORE, SETTINGS, completion, eventually, timeless

from mlflow_llm.serving.interface.errors import Conflict, NotFound, PackagingError
from mlflow_llm.serving.supervision.supervisor import EngineSpec, Supervisor
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import attach

GREENLETS = """
from gevent import monkey; monkey.patch_all()
import gevent, os, sys
from mlflow_llm.serving.transport.client.gevent_client import attach
address = engine.io.finder.state.path
green = attach(address, timeout=240)
def read(i):
    stream = green.submit(request(50, f"r{i}"))
    return len(list(stream))
jobs = [gevent.spawn(read, i) for i in range(20)]
gevent.sleep(0.05)
os.kill(green.info.pid, 9)
gevent.joinall(jobs, timeout=240, raise_error=True)
print(*{job.value for job in jobs}, flush=True)
green.close()
"""


@pytest.fixture
def supervise(place):
    """Return ``supervise(**options)``, which makes a supervisor that is closed at the end, leaving nothing."""
    made = []

    def make(**options):
        made.append(Supervisor(state_dir=place.runtime, **options))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()
    place.assert_clean()


def model_of(bundle):
    return EngineSpec(bundle=bundle, settings=SETTINGS, core=CORE)


def pids(place):
    return {process.pid for process in place.engines()}


def test_supervised_engine_comes_back(place, make_bundle, supervise):
    """An engine is restarted though nothing runs on it, probed anew, and attached clients go on."""
    bundle = make_bundle(step_delay=0.003)
    probed = []
    supervisor = supervise(probe=lambda engine: probed.append(engine.info.pid))
    supervisor.add("a", model_of(bundle))
    status = supervisor.await_ready("a")
    (replica,) = status.ready
    with attach(replica.address) as engine:
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=100))
        first = next(stream)
        os.kill(pid, signal.SIGKILL)
        expected = timeless(InstantEngine(bundle).submit(completion(max_tokens=100)))
        assert timeless([first, *stream]) == expected
    assert eventually(lambda: [r.restarts for r in supervisor.status("a").ready] == [1])
    (pid,) = pids(place)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: pids(place) not in (set(), {pid}))
    assert eventually(lambda: [r.restarts for r in supervisor.status("a").ready] == [2])
    assert len(set(probed)) == len(probed) == 3


def test_replicas_come_and_go(place, make_bundle, supervise):
    """More replicas start processes, fewer end the last ones, zero ends all, and an unknown entity is refused."""
    supervisor = supervise()
    supervisor.add("a", model_of(make_bundle()), replicas=2)
    assert len(supervisor.await_ready("a", replicas=2).ready) == 2
    assert len(pids(place)) == 2
    first = supervisor.engine("a").info.pid
    supervisor.set_replicas("a", 1)
    assert eventually(lambda: pids(place) == {first})
    supervisor.set_replicas("a", 0)
    assert eventually(lambda: not pids(place))
    assert supervisor.status("a").replicas == ()
    with pytest.raises(NotFound, match="not ready"):
        supervisor.engine("a")
    supervisor.set_replicas("a", 1)
    assert supervisor.await_ready("a").ready
    for unknown in (supervisor.status, supervisor.remove, lambda name: supervisor.set_replicas(name, 1)):
        with pytest.raises(NotFound, match="no entity"):
            unknown("b")


def test_a_draining_replica_runs_while_it_is_used(place, make_bundle, supervise):
    """A removed engine runs, and is even restarted, until it is unused; added again in time, it stays."""
    used = {"yes"}
    supervisor = supervise(in_use=lambda address: bool(used))
    model = model_of(make_bundle(step_delay=0.003))
    supervisor.add("a", model)
    supervisor.await_ready("a")
    supervisor.remove("a")
    assert supervisor.entities() == ()
    assert eventually(lambda: [r.state for r in supervisor.status("a").replicas] == ["draining"])
    (pid,) = pids(place)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: pids(place) not in (set(), {pid}))
    supervisor.add("a", model)
    used.clear()
    assert supervisor.await_ready("a").ready
    assert supervisor.entities() == ("a",)
    supervisor.remove("a")
    assert eventually(lambda: not pids(place))
    with pytest.raises(NotFound):
        supervisor.status("a")


def test_a_model_that_does_not_load_is_tried_again(place, make_bundle, supervise):
    """A model that fails to load has the reason until its files exist; another model of the same name is a conflict."""
    bundle = make_bundle()
    weights = Path(bundle.model_dir, "instant.json")
    text = weights.read_text()
    weights.unlink()
    supervisor = supervise()
    supervisor.add("a", model_of(bundle))
    (failed,) = supervisor.await_ready("a").failed
    assert "instant.json" in failed.message
    weights.write_text(text)
    assert eventually(lambda: bool(supervisor.status("a").ready))
    assert supervisor.status("a").ready[0].message == ""
    elsewhere = shutil.copytree(bundle.model_dir, place.base + "/elsewhere")
    supervisor.add("a", model_of(msgspec.structs.replace(bundle, model_dir=elsewhere, tokenizer_dir=elsewhere)))
    with pytest.raises(Conflict, match="another model"):
        supervisor.add("a", EngineSpec(bundle=bundle, core=CORE))


def test_greenlets(place, make_bundle):
    """Twenty greenlets stream over one connection through the engine's death."""
    code = GREENLETS.replace("from gevent import monkey; monkey.patch_all()\n", "")
    code = code.replace("green = attach", "engine.io.keep = True\ngreen = attach")
    child = place.run(code, make_bundle(step_delay=0.01))
    out, err = child.communicate(timeout=240)
    assert out.split() == ["51"], err
    place.assert_clean()


def test_tcp_needs_the_key(place, make_bundle, tmp_path):
    """Over TCP the shared key opens an engine; no key, or a key others can read, is refused before anything starts."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    bundle = make_bundle()
    with pytest.raises(PackagingError, match="key"):
        place.connect(bundle, listen=listen)
    with place.connect(bundle, listen=listen, key_file=str(key)):
        with attach(listen, key_file=str(key)) as remote:
            expected = timeless(InstantEngine(bundle).submit(completion()))
            assert timeless(remote.submit(completion())) == expected
        key.chmod(0o644)
        with pytest.raises(PackagingError, match="chmod"):
            attach(listen, key_file=str(key))
    place.assert_clean()
