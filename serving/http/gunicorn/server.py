"""Start a server: the controller process, then gunicorn's arbiter and its workers. ``serve(spec)`` blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from gunicorn.app.base import BaseApplication

from ...control.server_directory import ServerRecord, server_directory, write_record
from ...control.spec import ServeSpec
from ...observability.exporter_process import exporting
from ...system import logs
from ...system.imports import hide_torch
from ...tasks.cache_salt import SECRET_BYTES
from .accept_balancing import AcceptBalancer
from .kept_process import KeptProcess, Progress
from .listen_addresses import addresses, bind, umask

PROMETHEUS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
SPEC = "spec.json"
METRICS = "metrics"
MAX_FILES = 65536
DRAINED_SECONDS = 10.0  # for a process to end after its requests have ended
BOOT_SECONDS = 300  # a worker that imports and connects for longer than this is restarted


def serve(spec: ServeSpec, progress: Progress | None = None) -> None:
    """Serve until a signal ends the server.

    ``progress`` is called with each step: ``{"stage": "loading" | "token" | "ready" | "listening", …}``. Raises
    ``EngineDied`` and ``PackagingError`` if an engine does not start.
    """
    _allow_files()
    with server_directory() as directory:
        (directory / SPEC).write_bytes(msgspec.json.encode(spec))
        (directory / METRICS).mkdir()
        os.environ[PROMETHEUS_DIRECTORY] = str(directory / METRICS)
        settings = spec.settings
        tracing = exporting(
            directory,
            sample=settings.trace_sample,
            experiment=settings.trace_experiment,
            log_file=settings.log_file,
        )
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
    """Raise this process's limit of open files as far as allowed, up to ``MAX_FILES``: default limits are often too low
    for a thousand connections per worker and the sockets to engines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _controller(directory: Path) -> KeptProcess:
    """Start the controller process. Its engines outlive it, because the workers are their clients too."""
    return KeptProcess("serving.control.main", directory, what="the controller process", last="ready")


def _rpc(spec: ServeSpec, directory: Path, cache_secret: bytes) -> AbstractContextManager[KeptProcess | None]:
    """Start the process that serves gRPC, if the settings have a port for it."""
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
    """gunicorn with our worker, arbiter and logger, configured only from the spec, never from gunicorn's files."""

    def __init__(
        self, spec: ServeSpec, directory: Path, controller: KeptProcess, progress: Progress | None = None
    ) -> None:
        self.spec, self.directory, self.controller = spec, directory, controller
        self.rpc: KeptProcess | None = None
        self.progress = progress
        self.cache_secret = secrets.token_bytes(SECRET_BYTES)  # inherited by every worker, never written to disk
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
            "http_parser": "python",  # ``request_smuggling`` closes the leniencies of this parser
            # no header that a client sends may change its path or scheme, whatever address it comes from
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
        """Connect to the engines and build the application, in a worker."""
        from .worker_app import build

        self.controller.forget()
        if self.rpc is not None:
            self.rpc.forget()
        return build(self.spec, self.directory, self.cache_secret)

    def run(self) -> None:
        from .worker import ServerArbiter

        logs.configure(self.spec.settings.log_level, self.spec.settings.log_file)
        arbiter = os.getpid()
        try:
            ServerArbiter(self).run()
        # the arbiter returns this way, and so does a worker, which must not run the arbiter's code below on the stack
        except SystemExit as ended:
            if os.getpid() != arbiter:
                logging.shutdown()  # writes the lines that are still queued
                os._exit(ended.code if isinstance(ended.code, int) else 1)
            if ended.code:
                raise

    def _listening(self, arbiter: Any) -> None:
        self._record(arbiter)
        if self.progress is None:
            return
        for stage, listener in zip(("listening", "probes"), arbiter.LISTENERS, strict=False):
            name = listener.sock.getsockname()
            address = {"socket": name} if isinstance(name, str) else {"host": name[0], "port": name[1]}
            secure = self.spec.settings.tls_cert is not None
            self.progress({"stage": stage, "scheme": "https" if secure else "http", **address})

    def _record(self, arbiter: Any) -> None:
        """Write where the server listens into its directory, for ``mlflow-llm ps``."""
        scheme = "http" if self.spec.settings.tls_cert is None else "https"
        names = [listener.sock.getsockname() for listener in arbiter.LISTENERS[:1]]
        urls = tuple(bind(name) if isinstance(name, str) else f"{scheme}://{bind(name[:2])}" for name in names)
        with contextlib.suppress(OSError):  # a full disk must not stop a server that is ready
            write_record(self.directory, ServerRecord(pid=os.getpid(), addresses=urls))

    def keep_processes(self) -> None:
        """Restart the processes that have ended."""
        self.controller.ensure_running()
        if self.rpc is not None and (ended := self.rpc.ensure_running()) is not None:
            self._merge_counters(ended)

    def _assign_slot(self, arbiter: Any, worker: Any) -> None:
        worker.slot = self.balancer.assign()

    def _forked(self, arbiter: Any, worker: Any) -> None:
        """Hide torch from a worker that must not load it, before the worker imports its own modules."""
        if not self.spec.trusts_remote_code:
            hide_torch()

    def _forget_worker(self, arbiter: Any, worker: Any) -> None:
        self.balancer.reclaim(worker.slot)
        self._merge_counters(worker.pid)

    def _merge_counters(self, pid: int) -> None:
        from ...observability.worker_counters import (
            merge_ended,  # imported late: prometheus_client looks for the directory only at import
        )

        merge_ended(self.directory / METRICS, pid)
