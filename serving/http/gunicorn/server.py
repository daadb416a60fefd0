"""Starts a server: the controller process, then gunicorn's arbiter and its workers. ``serve(spec)`` blocks."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from gunicorn.app.base import BaseApplication

from ... import logs
from ...control.server_directory import server_directory
from ...control.spec import ServeSpec
from ...observability.exporter_process import exporting
from ...tasks.cache_salt import SECRET_BYTES
from ...torch_free import hide_torch
from .accept_balancing import AcceptBalancer
from .kept_process import KeptProcess, Progress
from .listen_addresses import addresses, bind, umask

PROMETHEUS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
SPEC = "spec.json"
METRICS = "metrics"
MAX_FILES = 65536
DRAINED_SECONDS = 10.0  # in which a process ends whose requests have
BOOT_SECONDS = 300  # a worker that imports and connects for longer than this is started anew


def serve(spec: ServeSpec, progress: Progress | None = None) -> None:
    """Serve until a signal ends it. Raises ``EngineDied``, ``PackagingError`` where an engine does not come up.

    ``progress`` is called with each step: ``{"stage": "loading" | "token" | "ready" | "listening", …}``.
    """
    _allow_files()
    with server_directory() as directory:
        (directory / SPEC).write_bytes(msgspec.json.encode(spec))
        (directory / METRICS).mkdir()
        os.environ[PROMETHEUS_DIRECTORY] = str(directory / METRICS)
        settings = spec.settings
        tracing = exporting(directory, sample=settings.trace_sample, experiment=settings.trace_experiment)
        try:
            with tracing, _controller(directory) as controller:
                controller.await_ready(progress or (lambda _: None))
                application = Application(spec, directory, controller, progress)
                with _rpc(spec, directory, application.cache_secret) as application.rpc:
                    if application.rpc is not None:
                        application.rpc.await_ready(progress or (lambda _: None))
                    application.run()
        finally:
            os.environ.pop(PROMETHEUS_DIRECTORY, None)


def _allow_files() -> None:
    """As many open files as this process may allow itself: a thousand connections a worker are more than many a default
    has room for, beside sockets to engines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _controller(directory: Path) -> KeptProcess:
    """The controller process. Its engines outlive it: the workers are their clients too."""
    return KeptProcess("serving.control.main", directory, what="the controller process", last="ready")


def _rpc(spec: ServeSpec, directory: Path, cache_secret: bytes) -> AbstractContextManager[KeptProcess | None]:
    """The process that serves gRPC, where one is wanted."""
    if spec.settings.grpc_port is None:
        return contextlib.nullcontext()
    return KeptProcess(
        "serving.rpc.main",
        directory,
        what="the gRPC process",
        last="grpc",
        hello=cache_secret.hex().encode() + b"\n",
        seconds=spec.settings.drain_timeout + DRAINED_SECONDS,
    )


class Application(BaseApplication):
    """gunicorn with our worker, arbiter and logger; configured from the spec alone, never from gunicorn's files."""

    def __init__(
        self, spec: ServeSpec, directory: Path, controller: KeptProcess, progress: Progress | None = None
    ) -> None:
        self.spec, self.directory, self.controller = spec, directory, controller
        self.rpc: KeptProcess | None = None
        self.progress = progress
        self.cache_secret = secrets.token_bytes(SECRET_BYTES)  # inherited by every worker, and on no disk
        self.balancer = AcceptBalancer(spec.settings.workers)
        super().__init__()

    def load_config(self) -> None:
        settings = self.spec.settings
        values = {
            "bind": [bind(address) for address in addresses(settings)],
            "umask": umask(settings),
            "workers": settings.workers,
            "worker_class": "mlflow_llm.serving.http.gunicorn.worker.DrainingWorker",
            "logger_class": "mlflow_llm.serving.http.gunicorn.worker.JsonLogger",
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
            "http_parser": "python",  # whose leniencies ``request_smuggling`` knows
            # nothing that a client sends moves its path or scheme, from whatever address it comes
            "forwarded_allow_ips": "",
            "forwarder_headers": "",
            "secure_scheme_headers": {},
            "pre_fork": self._assign_slot,
            "post_fork": self._forked,
            "child_exit": self._forget_worker,
            "when_ready": self._listening,
        }
        for name, value in values.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """In a worker: connect to the engines, build the application."""
        from .worker_app import build

        self.controller.forget()
        if self.rpc is not None:
            self.rpc.forget()
        return build(self.spec, self.directory, self.cache_secret)

    def run(self) -> None:
        from .worker import ServerArbiter

        logs.configure(self.spec.settings.log_level)
        arbiter = os.getpid()
        try:
            ServerArbiter(self).run()
        except SystemExit as ended:  # how the arbiter returns, and a worker: what is below on its stack is not its own
            if os.getpid() != arbiter:
                os._exit(ended.code if isinstance(ended.code, int) else 1)
            if ended.code:
                raise

    def _listening(self, arbiter: Any) -> None:
        if self.progress is None:
            return
        for stage, listener in zip(("listening", "probes"), arbiter.LISTENERS, strict=False):
            name = listener.sock.getsockname()
            address = {"socket": name} if isinstance(name, str) else {"host": name[0], "port": name[1]}
            secure = self.spec.settings.tls_cert is not None
            self.progress({"stage": stage, "scheme": "https" if secure else "http", **address})

    def keep_processes(self) -> None:
        """Start again what has ended."""
        self.controller.ensure_running()
        if self.rpc is not None and (ended := self.rpc.ensure_running()) is not None:
            self._merge_counters(ended)

    def _assign_slot(self, arbiter: Any, worker: Any) -> None:
        worker.slot = self.balancer.assign()

    def _forked(self, arbiter: Any, worker: Any) -> None:
        """In a worker, before it imports anything of its own."""
        if not self.spec.trusts_remote_code:
            hide_torch()

    def _forget_worker(self, arbiter: Any, worker: Any) -> None:
        self.balancer.reclaim(worker.slot)
        self._merge_counters(worker.pid)

    def _merge_counters(self, pid: int) -> None:
        from ...observability.worker_counters import (
            merge_ended,  # prometheus_client, once imported, looks no more for the directory
        )

        merge_ended(self.directory / METRICS, pid)
