"""A closed loop of callers on an HTTP endpoint: each sends its next request when the last answer has come."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Result:
    """``latencies`` in seconds, one a request; ``wall`` from the first request sent to the last answer."""

    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall: float = 0.0

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies) if self.latencies else float("nan")


def post(port: int, path: str, body: dict[str, Any], timeout: float = 900) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {data[:200]!r}")
        return json.loads(data)
    finally:
        connection.close()


def closed_loop(port: int, path: str, bodies: list[dict[str, Any]], callers: int) -> Result:
    """Send ``bodies`` with ``callers`` at once."""
    result, lock, todo = Result(), threading.Lock(), iter(bodies)

    def caller() -> None:
        while True:
            with lock:
                body = next(todo, None)
            if body is None:
                return
            start = time.perf_counter()
            try:
                post(port, path, body)
            except (RuntimeError, OSError) as error:
                result.errors.append(str(error))
                continue
            result.latencies.append(time.perf_counter() - start)

    threads = [threading.Thread(target=caller) for _ in range(callers)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.wall = time.perf_counter() - start
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ModelsServe:
    """`mlflow models serve` of a saved model, up for as long as the `with` lasts; ``ready_after`` in seconds."""

    def __init__(self, model: Path, *, workers: int = 1, log: Path | None = None) -> None:
        self.port = free_port()
        self.ready_after = 0.0
        self._command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model), "-p", str(self.port)]
        self._command += ["--env-manager", "local", "--workers", str(workers), "--timeout", "900"]
        self._log = log

    def __enter__(self) -> ModelsServe:
        out = self._log.open("wb") if self._log else subprocess.DEVNULL
        # mlflow looks for uvicorn on the PATH; this interpreter's environment may not be activated.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, "PATH": path}
        )
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - start > 300:
                raise RuntimeError("the server did not come up")
            time.sleep(0.2)
        self.ready_after = time.perf_counter() - start
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
                return b" 200 " in probe.recv(64)
        except OSError:
            return False

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(60)
