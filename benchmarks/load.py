"""Servers under load in benchmarks. The closed loop is that of `mlflow-llm bench` (`serving/cli/load_generator.py`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

START = 1200.0  # seconds that a server may take to come up


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server's process, up for as long as the `with` lasts; ``ready_after`` is seconds from its start.

    ``command`` listens on ``port``; ``probe`` is the path that answers 200 when it is ready.
    """

    def __init__(self, command: list[str], port: int, *, probe: str = "/ready", log: Path | None = None) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.ready_after = 0.0
        self._command, self._probe, self._log = command, probe, log

    def __enter__(self) -> Server:
        # mlflow looks for uvicorn on the PATH; this interpreter's environment may not be activated.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        start = time.perf_counter()
        with self._log.open("wb") if self._log else nullcontext(subprocess.DEVNULL) as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, "PATH": path}
            )
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - start > START:
                self.__exit__()
                told = self._log.read_text()[-2000:] if self._log else ""
                raise RuntimeError(f"the server did not come up {told}")
            time.sleep(0.02)
        self.ready_after = time.perf_counter() - start
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(f"GET {self._probe} HTTP/1.0\r\n\r\n".encode())
                return b" 200 " in probe.recv(64)
        except OSError:
            return False

    def worker_seconds(self) -> float:
        """Return the CPU time of the workers so far: children forked from the server, not started anew."""
        import psutil

        server = psutil.Process(self._process.pid)
        times = [child.cpu_times() for child in server.children() if child.cmdline() == server.cmdline()]
        return sum(time.user + time.system for time in times)

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(60)


class ModelsServe(Server):
    """A `mlflow models serve` process of a saved model."""

    def __init__(self, model: Path, *, workers: int = 1, log: Path | None = None) -> None:
        port = free_port()
        command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model), "-p", str(port)]
        command += ["--env-manager", "local", "--workers", str(workers), "--timeout", "900"]
        super().__init__(command, port, probe="/ping", log=log)


class LlmServe(Server):
    """An `mlflow-llm serve` process with ``arguments``; ``port`` is given where they name it (``--spec``)."""

    def __init__(self, *arguments: str, port: int | None = None, log: Path | None = None) -> None:
        if port is None:
            port = free_port()
            arguments = (*arguments, "--port", str(port))
        super().__init__([sys.executable, "-m", "mlflow_llm.serving.cli", "serve", *arguments], port, log=log)
