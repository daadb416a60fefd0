"""A real server, gunicorn and engine process and all, on a free loopback port."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.payload_log import PayloadLog
from mlflow_llm.serving.interface.settings import EngineSettings

INSTANT_CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
GATED_CORE = "gated_core:GatedCore"
PORTS = range(12_000, 32_000)  # below Linux' ip_local_port_range

# ``running(in_worker=…)``: gunicorn forks its workers, and each runs the code before it makes its application
SERVE = """
from mlflow_llm.serving.cli import main
from mlflow_llm.serving.http.gunicorn.worker import DrainingWorker
load_wsgi = DrainingWorker.load_wsgi
def load(self):
    exec({in_worker!r}, {{}})
    load_wsgi(self)
DrainingWorker.load_wsgi = load
main()
"""


class Running:
    """A running server. ``log()`` is its output so far; ``runtime`` is where its engines are found; ``model_dir``
    belongs to its first endpoint.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, model_dir: str) -> None:
        self.process, self.port, self._log, self.model_dir = process, port, log, model_dir
        self.runtime = log.parent
        self.url = f"http://127.0.0.1:{port}"

    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def _ports() -> Iterator[int]:
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    own = PORTS[process::8]
    first = os.getpid() % len(own)
    return itertools.cycle([*own[first:], *own[:first]])


_own_ports = _ports()


def free_port() -> int:
    """Return a port reserved for this test process, which the kernel gives to no connection and to nobody asking for
    any.
    """
    return next(filter(_is_free, _own_ports))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(
    bundle: Bundle,
    *,
    core: str | None = INSTANT_CORE,
    engine: EngineSettings | None = None,
    name: str = "assistant",
    seconds: float = 240,
    until: str = "",
    addresses: tuple[str, ...] = (),
    key_file: str | None = None,
    more: tuple[EndpointSpec, ...] = (),
    payload_log: PayloadLog | None = None,
    runtime_dir: str | None = None,
    in_worker: str = "",
    hosts: int = 0,
    **settings: object,
) -> Iterator[Running]:
    """Start a server of ``bundle`` as one endpoint, and of ``more``; wait until it is ready, or says ``until``, and end
    it with all its processes. ``runtime_dir`` is where it shares engines with other servers, ``in_worker`` is Python
    code that each worker runs first; ``hosts`` is on how many joined hosts the endpoint has an engine."""
    port = free_port()
    # a short path of our own: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mll-") as runtime:
        spec = ServeSpec(
            endpoints=(
                EndpointSpec(
                    name=name,
                    entity="model-1",
                    bundle=bundle,
                    core=core,
                    created=1,
                    engine=engine or EngineSettings(idle_timeout=0.3),
                    addresses=addresses,
                    key_file=key_file,
                    payload_log=payload_log,
                    placement="hosts" if hosts else None,
                    replicas=hosts or None,
                ),
                *more,
            ),
            settings=ServerSettings(**({"workers": 1} | ({} if "socket" in settings else {"port": port}) | settings)),
            runtime_dir=runtime_dir or runtime,
        )
        path, log = Path(runtime, "serve.json"), Path(runtime, "log")
        path.write_bytes(msgspec.json.encode(spec))
        program = ["-c", SERVE.format(in_worker=in_worker)] if in_worker else ["-m", "mlflow_llm.serving.cli"]
        with open(log, "wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *program, "serve", "--spec", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            )
        server = Running(process, port, log, bundle.model_dir)
        try:
            _await(server, seconds, until)
            yield server
        except BaseException:
            print(server.log()[-8000:])  # shown with the test that failed
            raise
        finally:
            _end(process)
            _await_engines(Path(runtime))


def python_path() -> str:
    """Return a PYTHONPATH with the tests' engine cores, which engines import by name."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def _await(server: Running, seconds: float, said: str) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        if said:
            if said in server.log():
                return
            time.sleep(0.01)
            continue
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/ready", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server did not come up:\n{server.log()[-4000:]}")


def _await_engines(runtime: Path) -> None:
    """Wait for the engines to end after their last client, since their directory must live until then."""
    until = time.monotonic() + 240
    while any(runtime.glob("*/spec.json")):
        assert time.monotonic() < until, "an engine outlives its server"
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(240)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
