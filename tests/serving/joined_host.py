"""A joined host in a process of its own, which finds a model by its directory: what another machine would run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
from serving_process import free_port, python_path

from mlflow_llm.serving.control.hosts.agent import HostAgent
from mlflow_llm.serving.control.hosts.host_adapters import HostAdapters
from mlflow_llm.serving.control.hosts.host_identity import HostIdentity
from mlflow_llm.serving.control.hosts.journals import HostJournals
from mlflow_llm.serving.endpoints.adapter_contents import AdapterContents
from mlflow_llm.serving.endpoints.config import EntityConfig
from mlflow_llm.serving.endpoints.engine_hosts import EngineHosts, Offer
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.supervision.warm_up import generate_one
from mlflow_llm.serving.system.journal import journals

GIB = 2**30


def found(entity: EntityConfig, bundle: Bundle) -> EntityConfig:
    """Return ``entity`` with the files of ``bundle``, as a lookup by its URI would."""
    return msgspec.structs.replace(entity, source=msgspec.structs.replace(entity.model, bundle=bundle))


def main(url: str, key_file: str, name: str, port: str, place: str, bundle: str) -> None:
    """Run a host until SIGTERM."""
    state = Path(place, "state")
    with contextlib.closing(Store(url)) as store:
        agent = HostAgent(
            EngineHosts(store),
            Offer(memory=GIB, cpus=1),
            host=HostIdentity(state).host,
            name=name,
            listen=f"tcp://127.0.0.1:{port}",
            key_file=key_file,
            find=functools.partial(found, bundle=msgspec.json.decode(bundle, type=Bundle)),
            probe=generate_one,
            journals=HostJournals(store, state),
            adapters=HostAdapters(AdapterContents(store, time.time), state / "adapter-requests"),
            state_dir=str(Path(place, "r")),
        )
        signal.signal(signal.SIGTERM, lambda *_: agent.stop())
        agent.run()


class JoinedHost:
    """A joined host: ``start`` it as often as wanted, ``kill`` it with its engines, as a machine that loses power."""

    def __init__(self, url: str, key_file: str, name: str, place: Path, bundle: Bundle) -> None:
        self._place = place
        self._arguments = (url, key_file, name, str(free_port()), str(place), msgspec.json.encode(bundle).decode())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._place / "log", "ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            )

    def log(self) -> str:
        return (self._place / "log").read_text()

    def counting(self) -> int:
        """Return how many tokens the engines of this host have generated for requests that are running."""
        roots = self._place.glob("state/*/engines")
        return sum(said.tokens for root in roots for one in journals(root) for said in one.running())

    def kill(self) -> None:
        """End the host and its engines at once."""
        assert self._process is not None
        engines = [int(json.loads(path.read_text())["pid"]) for path in self._place.glob("r/*/status.json")]
        self._process.kill()
        self._process.wait(240)
        for pid in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine = psutil.Process(pid)
                engine.kill()
                engine.wait(240)

    def end(self) -> None:
        if self._process is None:
            return
        while self._process.poll() is None:  # the second signal ends running requests at once
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)


@contextlib.contextmanager
def joined_host(url: str, key_file: str, name: str, bundle: Bundle) -> Iterator[JoinedHost]:
    """Start a host that joins the database at ``url``, and end it."""
    with tempfile.TemporaryDirectory(prefix="mlh-") as place:  # a short path, for Unix sockets
        host = JoinedHost(url, key_file, name, Path(place), bundle)
        host.start()
        try:
            yield host
        except BaseException:
            print(host.log()[-4000:])  # shown with the test that failed
            raise
        finally:
            host.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
