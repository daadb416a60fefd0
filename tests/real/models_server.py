"""``mlflow models serve`` for tests: on a free port, in a process group that is ended as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

MARK = "MLFLOW_LLM_TEST_MARK"


class ModelsServer:
    """The environment of every process it starts carries ``mark``, by which they are found again.

    ``settings`` that nobody else uses give it an engine of its own: engines are shared by model and settings.
    """

    def __init__(self, model: Path, workers: int, log: Path, settings: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.mark = uuid.uuid4().hex
        self.log = log
        command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model), "--env-manager", "local"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--workers", str(workers)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, MARK: self.mark, "PATH": path, "SERVING_MODEL_CONFIG": json.dumps(settings)}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=log.parent
            )

    def wait_until_ready(self, timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ping", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def post(self, body: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/invocations", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def processes(self) -> list[psutil.Process]:
        """Return all processes with this server's mark, the engine included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_until_gone(self, timeout: float = 240) -> list[str]:
        """Wait for all processes to end and return the command lines of those that remain."""
        self.process.wait(timeout=timeout)
        deadline = time.monotonic() + timeout
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [repr(process) for process in left]


@contextlib.contextmanager
def models_server(model: Path, workers: int, log: Path, settings: dict[str, Any]) -> Iterator[ModelsServer]:
    server = ModelsServer(model, workers, log, settings)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.signal(signal.SIGTERM)
        left = server.wait_until_gone()
        for process in server.processes():
            process.kill()
        assert left == []
