"""Engines kept by a supervisor and used by attached clients: threads, greenlets, other hosts."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from transport_place import CORE, SETTINGS, completion, eventually, timeless

from mlflow_llm.serving.engine.instant_engine import InstantEngine
from mlflow_llm.serving.errors import PackagingError
from mlflow_llm.serving.transport import attach
from mlflow_llm.serving.transport.supervisor import Supervisor

GREENLETS = """
from gevent import monkey; monkey.patch_all()
import gevent, os, sys
from mlflow_llm.serving.transport.client_gevent import attach
address = engine._link.finder.state.path
green = attach(address, timeout=10)
def read(i):
    stream = green.submit(request(50, f"r{i}"))
    return len(list(stream))
jobs = [gevent.spawn(read, i) for i in range(20)]
gevent.sleep(0.05)
os.kill(green.info.pid, 9)
gevent.joinall(jobs, timeout=15, raise_error=True)
print(*{job.value for job in jobs}, flush=True)
green.close()
"""


def test_supervised_engine_comes_back(place, make_bundle):
    """A supervised engine is restarted though nothing runs on it, and attached clients go on."""
    bundle = make_bundle(step_delay=0.003)
    supervisor = Supervisor(state_dir=place.runtime, core=CORE)
    address = supervisor.start("a", bundle, SETTINGS)
    assert supervisor.addresses() == {"a": address}
    with attach(address) as engine:
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=100))
        first = next(stream)
        os.kill(pid, signal.SIGKILL)
        expected = timeless(InstantEngine(bundle).submit(completion(max_tokens=100)))
        assert timeless([first, *stream]) == expected
    pid = place.engines()[0].pid
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: [p.pid for p in place.engines()] not in ([], [pid]))
    assert eventually(lambda: supervisor.health()["a"].status == "ready")
    supervisor.close()
    place.assert_clean()


def test_greenlets(place, make_bundle):
    """Twenty greenlets stream over one connection through the engine's death."""
    code = GREENLETS.replace("from gevent import monkey; monkey.patch_all()\n", "")
    code = code.replace("green = attach", "engine._link.keep = True\ngreen = attach")
    child = place.run(code, make_bundle(step_delay=0.01))
    out, err = child.communicate(timeout=30)
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
