"""The process that exports traces: to MLflow, and to OpenTelemetry where its environment variables name a collector.

``python -m mlflow_llm.serving.observability.trace_exporter DIRECTORY EXPERIMENT`` takes the workers' records until its
standard input closes, which the server holds open for as long as it lives. With ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or
``…_TRACES_ENDPOINT``) set, spans go there; to MLflow they go too unless only the collector is named and
``MLFLOW_TRACKING_URI`` is not.
"""

from __future__ import annotations

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

from .. import logs
from ..backoff import Backoff
from .spans import mlflow_attributes, readable_span, semantic_attributes, trace_info
from .tracing import MAX_QUEUED, SOCKET, SpanRecord

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DRAIN_SECONDS = 5.0
RETRY_SECONDS = 10.0
MAX_RETRY_SECONDS = 300.0
BATCH = 32


class Sink(Protocol):
    """Where spans go."""

    def export(self, records: list[SpanRecord]) -> None:
        """May raise anything; the records are then lost."""
        ...


class MlflowSink:
    """Traces of an experiment. A span with a parent joins the caller's trace, which its own client completes."""

    def __init__(self, experiment: str) -> None:
        import mlflow
        from mlflow.tracing.client import TracingClient

        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(experiment)
        self.experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        self._client = TracingClient()

    def export(self, records: list[SpanRecord]) -> None:
        from mlflow.entities import Span, TraceData

        for record in records:
            span = Span(readable_span(record, mlflow_attributes(record)))
            info = None if record.trace.parent_id else self._client.start_trace(trace_info(record, self.experiment_id))
            try:
                self._client.log_spans(self.experiment_id, [span])
            except NotImplementedError:  # a store of files
                if info is not None:
                    self._client._upload_trace_data(info, TraceData([span]))


class OtlpSink:
    """OpenTelemetry's own exporter, configured by its own environment variables."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource

        kind = "grpc" if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").startswith("grpc") else "http"
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        self._exporter: Any = module.OTLPSpanExporter()
        self._resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "mlflow-llm")})

    def export(self, records: list[SpanRecord]) -> None:
        self._exporter.export([readable_span(r, semantic_attributes(r), self._resource) for r in records])


def sinks(experiment: str) -> list[Sink]:
    """Those that the environment asks for. Raises what their construction raises."""
    collector = any(os.environ.get(name) for name in OTLP_VARIABLES)
    found: list[Sink] = [OtlpSink()] if collector else []
    if not collector or os.environ.get("MLFLOW_TRACKING_URI"):
        found.append(MlflowSink(experiment))
    return found


class Exporter:
    """Takes records from the workers and gives them to the sinks, a few at a time, on this one thread."""

    def __init__(self, directory: Path, targets: list[Sink]) -> None:
        self._targets = targets
        self._decoder = msgspec.msgpack.Decoder(SpanRecord)
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.bind(f"ipc://{directory / SOCKET}")

    def run(self) -> None:
        """Until standard input closes; then what is still coming, for ``DRAIN_SECONDS`` at most."""
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
        while len(records) < BATCH and self._socket.poll(0):
            records.append(self._decoder.decode(self._socket.recv()))
        for target in self._targets:
            try:
                if records:
                    target.export(records)
            except Exception as error:  # whatever a store or a network does: the next records may do better
                text = f"{type(error).__name__}: {str(error)[:300]}"
                logs.event("traces not exported", level=40, lost=len(records), error=text)


def _await_sinks(experiment: str) -> list[Sink] | None:
    """The sinks, tried again until they can be had (a tracking server may come later than we); None where standard
    input closes first. Meanwhile records wait in the workers, and those beyond their queues are dropped."""
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
    """Export until standard input closes; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server decides when we end
    logs.configure()
    targets = _await_sinks(argv[1])
    if targets is None:
        return 1
    logs.event("exporting traces", to=[type(target).__name__.removesuffix("Sink").lower() for target in targets])
    Exporter(Path(argv[0]), targets).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
