"""The process that exports traces to MLflow, and to an OpenTelemetry collector if environment variables name one.

``python -m mlflow_llm.serving.observability.trace_exporter DIRECTORY EXPERIMENT`` receives the workers' records until
its standard input closes, which the server keeps open as long as it lives. If ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or
``…_TRACES_ENDPOINT``) is set, spans go to that collector. They go to MLflow too, unless a collector is named and
``MLFLOW_TRACKING_URI`` is not set.
"""

from __future__ import annotations

import functools
import importlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from ..model_files.model_uri import LOGGED_MODEL
from ..system import logs
from ..system.backoff import Backoff
from .spans import mlflow_attributes, readable_span, semantic_attributes, trace_info
from .tracing import MAX_QUEUED, SOCKET, SpanRecord

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DRAIN_SECONDS = 5.0
RETRY_SECONDS = 10.0
MAX_RETRY_SECONDS = 300.0
BATCH_RECORDS = 32
MAX_MODELS = 1000  # whose ids are remembered


class Sink(Protocol):
    """A destination of spans."""

    def export(self, records: list[SpanRecord]) -> None:
        """Export the records. It may raise anything; the records are then lost."""
        ...


class MlflowSink:
    """A sink that exports to an MLflow experiment. A span with a parent joins the caller's trace, which the caller's
    client completes."""

    def __init__(self, experiment: str) -> None:
        import mlflow
        from mlflow.tracing.client import TracingClient

        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(experiment)
        self.experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        self._client = TracingClient()
        self._registry = client
        self._model_id = functools.lru_cache(MAX_MODELS)(self._find_model_id)

    def export(self, records: list[SpanRecord]) -> None:
        from mlflow.entities import Span, TraceData

        for record in records:
            span = Span(readable_span(record, mlflow_attributes(record)))
            info = None
            if not record.trace.parent_id:
                model_id = self._model_id(record.model.name, record.model.version)
                info = self._client.start_trace(trace_info(record, self.experiment_id, model_id))
            try:
                self._client.log_spans(self.experiment_id, [span])
            except NotImplementedError:  # MLflow's file store
                if info is not None:
                    self._client._upload_trace_data(info, TraceData([span]))

    def _find_model_id(self, name: str, version: str) -> str | None:
        """Return the id of the logged model behind a registered version, by which MLflow shows its traces.

        A registry may have forgotten the version, or be another server's; the trace is then without the id.
        """
        from mlflow.exceptions import MlflowException

        if not version.isdecimal():
            return None
        try:
            found = self._registry.get_model_version(name, version)
        except MlflowException as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            logs.event("traces have no model id", level=30, model=f"{name}/{version}", error=text)
            return None
        # MLflow's own database leaves the field empty, and keeps the id in the source
        source = (found.source or "").removeprefix("models:").strip("/")
        return found.model_id or (source if LOGGED_MODEL.fullmatch(source) else None)


class OtlpSink:
    """A sink that exports with OpenTelemetry's own exporter, which its own environment variables configure."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource

        kind = "grpc" if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").startswith("grpc") else "http"
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        self._exporter: Any = module.OTLPSpanExporter()
        self._resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "mlflow-llm")})

    def export(self, records: list[SpanRecord]) -> None:
        self._exporter.export([readable_span(r, semantic_attributes(r), self._resource) for r in records])


def sinks(experiment: str) -> list[Sink]:
    """Return the sinks that the environment asks for. Raises what their constructors raise."""
    collector = any(os.environ.get(name) for name in OTLP_VARIABLES)
    found: list[Sink] = [OtlpSink()] if collector else []
    if not collector or os.environ.get("MLFLOW_TRACKING_URI"):
        found.append(MlflowSink(experiment))
    return found


class Exporter:
    """The part that receives records from the workers and gives them to the sinks in small batches, all on one
    thread."""

    def __init__(self, directory: Path, targets: list[Sink]) -> None:
        self._targets = targets
        self._decoder = msgspec.msgpack.Decoder(SpanRecord)
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.bind(f"ipc://{directory / SOCKET}")

    def run(self) -> None:
        """Export until standard input closes, then records that still arrive, for ``DRAIN_SECONDS`` at most."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while sys.stdin.fileno() not in dict(poller.poll()):
            self._step()
        until = time.monotonic() + DRAIN_SECONDS
        while self._socket.poll(500) and time.monotonic() < until:
            self._step()
        self._socket.close(0)

    def _step(self) -> None:
        records: list[SpanRecord] = []
        while len(records) < BATCH_RECORDS and self._socket.poll(0):
            records.append(self._decoder.decode(self._socket.recv()))
        for target in self._targets:
            try:
                if records:
                    target.export(records)
            except Exception as error:  # a store or network may fail in any way; the next records may succeed
                text = f"{type(error).__name__}: {str(error)[:300]}"
                logs.event("traces not exported", level=40, lost=len(records), error=text)


def _await_sinks(experiment: str) -> list[Sink] | None:
    """Create the sinks, and retry until that succeeds, since a tracking server may start later than this process.

    Return None if standard input closes first. Meanwhile records wait in the workers' queues; when these are full,
    records are dropped.
    """
    backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
    while True:
        try:
            return sinks(experiment)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            pause = backoff.failed()
            logs.event("traces cannot be exported", level=40, error=text, again_after=pause)
        if select.select([sys.stdin], [], [], pause)[0]:
            return None


def main(argv: list[str]) -> int:
    """Export until standard input closes, and return the exit status."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they may go to all processes, but the server decides when we end
        signal.signal(ignored, signal.SIG_IGN)
    logs.take_over(file=argv[2] if len(argv) > 2 else None)
    targets = _await_sinks(argv[1])
    if targets is None:
        return 1
    logs.event("exporting traces", to=[type(target).__name__.removesuffix("Sink").lower() for target in targets])
    Exporter(Path(argv[0]), targets).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
