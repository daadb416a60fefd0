"""A running server: a keeper for the engines, then gunicorn's arbiter and its workers. ``serve(spec)`` blocks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from gunicorn.app.base import BaseApplication

from ..errors import EngineDied, PackagingError
from . import logs
from .spec import ServeSpec

Progress = Callable[[dict[str, Any]], None]
PROMETHEUS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
BOOT_SECONDS = 300  # a worker that imports and connects for longer than this is started anew


def serve(spec: ServeSpec, progress: Progress | None = None) -> None:
    """Serve until a signal ends it. Raises ``EngineDied``, ``PackagingError`` where an engine does not come up.

    ``progress`` is told each step: ``{"stage": "loading" | "loaded" | "token" | "ready" | "listening", …}``.
    """
    directory = tempfile.mkdtemp(prefix="mlflow-llm-server-")
    try:
        path = Path(directory, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        metrics = Path(directory, "metrics")
        metrics.mkdir()
        os.environ[PROMETHEUS_DIRECTORY] = str(metrics)
        with keeper(path, progress or (lambda _: None)):
            Application(spec, progress).run()
    finally:
        os.environ.pop(PROMETHEUS_DIRECTORY, None)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def keeper(path: Path, progress: Progress) -> Iterator[None]:
    """The keeper process, ready. Leaving (or dying) closes its standard input, at which it ends."""
    command = [sys.executable, "-m", "mlflow_llm.serving.web.keeper", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        _await_ready(process, progress)
        yield
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if told["stage"] == "failed":
            raise PackagingError(told["message"])
        progress(told)
        if told["stage"] == "ready":
            return
    raise EngineDied("the engine keeper ended before the engines were ready")


class Application(BaseApplication):
    """gunicorn with our worker, arbiter and logger; configured from the spec alone, never from gunicorn's files."""

    def __init__(self, spec: ServeSpec, progress: Progress | None = None) -> None:
        self.spec = spec
        self.progress = progress
        super().__init__()

    def load_config(self) -> None:
        settings = self.spec.settings
        values = {
            "bind": [f"{settings.host}:{settings.port}"],
            "workers": settings.workers,
            "worker_class": "mlflow_llm.serving.web.worker.DrainingWorker",
            "logger_class": "mlflow_llm.serving.web.worker.JsonLogger",
            "worker_connections": settings.max_connections,
            "timeout": BOOT_SECONDS,
            "graceful_timeout": int(settings.drain_timeout) + 5,
            "keepalive": 75,
            "loglevel": "warning",
            "proc_name": "mlflow-llm",
            "control_socket_disable": True,
            "limit_request_line": 8190,
            "limit_request_fields": 100,
            "limit_request_field_size": 16384,
            "child_exit": _forget_worker,
            "when_ready": self._listening,
        }
        for name, value in values.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """In a worker: connect, prove that a token comes, build the application."""
        from .worker_app import build

        return build(self.spec)

    def run(self) -> None:
        from .worker import ServerArbiter

        logs.configure(self.spec.settings.log_level)
        try:
            ServerArbiter(self).run()
        except SystemExit as ended:  # how the arbiter returns
            if ended.code:
                raise

    def _listening(self, arbiter: Any) -> None:
        if self.progress is not None:
            host, port = arbiter.LISTENERS[0].sock.getsockname()[:2]
            self.progress({"stage": "listening", "host": host, "port": port})


def _forget_worker(arbiter: Any, worker: Any) -> None:
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
