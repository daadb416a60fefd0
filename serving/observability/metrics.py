"""The metrics for Prometheus: counters and histograms of all workers, and those of the engines at scrape time.

Workers are processes, so prometheus_client keeps their counters in memory-mapped files in one directory
(``PROMETHEUS_MULTIPROC_DIR``, which the server sets before it forks), and a scrape of any worker adds them up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ..interface.engine import Engine
from ..interface.errors import ShuttingDown, Unavailable
from ..metering.accounts.keys import Keys
from ..metering.ledger.ledger import Ledger
from ..model_files.model_version import ModelVersion
from .engine_counters import EngineCounters
from .worker_counters import counters_locked

CONTENT_TYPE = CONTENT_TYPE_LATEST
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
BY_ADAPTER = ("endpoint", "entity", "adapter")  # names that operators give: callers cannot make up a label
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

M = TypeVar("M", Counter, Histogram)

OWN = CollectorRegistry()
REQUESTS = Counter(
    "mlflow_llm_requests",
    "Requests by their HTTP status (200 with an error in the stream counts as the error's); without an endpoint: "
    "refused before one was known",
    (*BY_ADAPTER, "task", "status"),
    registry=OWN,
)
TOKENS = Counter("mlflow_llm_tokens", "Tokens by kind: prompt, cached, completion", (*BY_ADAPTER, "kind"), registry=OWN)
DISCONNECTS = Counter("mlflow_llm_disconnects", "Requests whose client disconnected", BY_ADAPTER, registry=OWN)
TRACES_DROPPED = Counter(
    "mlflow_llm_traces_dropped", "Traces dropped because the exporter was too far behind", registry=OWN
)
PAYLOADS_DROPPED = Counter(
    "mlflow_llm_payloads_dropped",
    "Requests missing in the payload log, because the store was too far behind or refused them",
    ("endpoint",),
    registry=OWN,
)
SHADOWS_DROPPED = Counter(
    "mlflow_llm_shadows_dropped",
    "Copies of requests that a shadow did not get, because it was too far behind or the server ended",
    ("endpoint", "entity"),
    registry=OWN,
)
SOFT_EXCEEDED = Counter(
    "mlflow_llm_soft_limit_exceeded",
    "Requests admitted beyond a soft limit, by the scope and kind of the limit",
    ("endpoint", "scope", "kind"),
    registry=OWN,
)
STORE_OUTAGES = Counter("mlflow_llm_store_outages", "Times that the store stopped answering, per worker", registry=OWN)
COUNT_VIOLATIONS = Counter(
    "mlflow_llm_ledger_violations",
    "Settlements that broke received <= billed <= generated, by rule; they were corrected",
    ("rule",),
    registry=OWN,
)
TTFT = Histogram(
    "mlflow_llm_time_to_first_token_seconds",
    "From the arrival of a streamed request to its first token",
    BY_ADAPTER,
    buckets=SECONDS,
    registry=OWN,
)
TPOT = Histogram(
    "mlflow_llm_time_per_output_token_seconds",
    "Mean time between the tokens of a choice, the longest of its request",
    BY_ADAPTER,
    buckets=TOKEN_SECONDS,
    registry=OWN,
)
E2E = Histogram(
    "mlflow_llm_request_seconds",
    "From the request's arrival to its last byte",
    BY_ADAPTER,
    buckets=SECONDS,
    registry=OWN,
)


def labeled(metric: M, *labels: str) -> M:
    """Return the series of ``metric`` with these labels, which is kept: the library checks and converts each label anew
    for each request."""
    found: M = _series(metric, labels)
    return found


@lru_cache(maxsize=4096)
def _series(metric: Any, labels: tuple[str, ...]) -> Any:
    return metric.labels(*labels)


class Entity(Protocol):
    """The parts of a served entity that metrics need: its endpoint's name, its own name, its model, its engine."""

    @property
    def endpoint(self) -> str: ...
    @property
    def entity(self) -> str: ...
    @property
    def identity(self) -> ModelVersion: ...
    @property
    def engine(self) -> Engine: ...


class Entities(Protocol):
    """The entities a worker serves (``routing.served_endpoints.ServedEndpoints``)."""

    def entities(self) -> Iterable[Entity]: ...


class EngineCollector(Collector):
    """A collector of the last heartbeats of every served entity at scrape time: sums over its replicas, and the
    counters from ``counters``."""

    LABELS = ("endpoint", "entity")
    MODEL = ("name", "version", "content_hash")
    INFO = (
        "kernels", "kernels_reason", "instruction_set", "dtype", "quantization", "device", "kv_cache_dtype",
        "kv_cache_reason",
    )  # fmt: skip
    GAUGES = (
        ("running_sequences", "Sequences in the engine's batch", "num_running"),
        ("waiting_requests", "Requests waiting for the engine", "num_waiting"),
        ("waiting_tenants", "Tenants that share the engine's queue", "num_tenants_waiting"),
        ("kv_tokens_used", "KV cache in use, tokens", "kv_tokens_used"),
        ("kv_tokens_total", "KV cache size, tokens", "kv_tokens_total"),
        ("last_step_age_seconds", "Seconds since the engine's last step", "last_step_age"),
        ("cpu_wait_ratio", "Share of its time that the engine waited for a CPU", "cpu_wait"),
        ("processor_wait_ratio", "The old name of cpu_wait_ratio, until the next release", "cpu_wait"),
        ("standbys", "Loaded engine processes that would take over", "num_standbys"),
    )
    COUNTERS = (
        ("engine_steps", "Forward passes", "steps"),
        ("prefix_hit_tokens", "Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
        ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
        ("generated_tokens", "Tokens sampled by the engine, delivered or not", "generated_tokens"),
        ("draft_tokens", "Tokens that speculation proposed", "draft_tokens"),
        ("accepted_draft_tokens", "Proposed tokens that were accepted", "accepted_tokens"),
    )

    def __init__(self, endpoints: Entities, counters: EngineCounters) -> None:
        self.endpoints, self.counters = endpoints, counters

    def collect(self) -> Iterator[Metric]:
        entities = list(self.endpoints.entities())
        found = [((entity.endpoint, entity.entity), entity.engine.health()) for entity in entities]
        for name, text, field in self.GAUGES:
            gauge = GaugeMetricFamily(f"mlflow_llm_{name}", text, labels=self.LABELS)
            for labels, health in found:
                gauge.add_metric(labels, float(getattr(health, field)))
            yield gauge
        seen = [((entity.endpoint, entity.entity), entity.engine.process_health()) for entity in entities]
        sums = self.counters.merge(seen)
        for name, text, field in self.COUNTERS:
            counter = CounterMetricFamily(f"mlflow_llm_{name}", text, labels=self.LABELS)
            for labels, counted in sums.items():
                counter.add_metric(labels, float(counted[field]))
            yield counter
        ready = GaugeMetricFamily("mlflow_llm_engine_ready", "1 if the engine makes progress", labels=self.LABELS)
        replicas = GaugeMetricFamily("mlflow_llm_replicas", "Engine processes", labels=self.LABELS)
        for entity, (labels, health) in zip(entities, found, strict=True):
            ready.add_metric(labels, float(health.status == "ready"))
            replicas.add_metric(labels, float(entity.engine.num_replicas))
        yield ready
        yield replicas
        yield from self._memory(entities)
        text = "Always 1: the version that answers, in the registry and by its content"
        models = GaugeMetricFamily("mlflow_llm_model_info", text, labels=(*self.LABELS, *self.MODEL))
        for entity, (labels, _) in zip(entities, found, strict=True):
            models.add_metric((*labels, *(getattr(entity.identity, name) for name in self.MODEL)), 1.0)
        yield models
        runs = GaugeMetricFamily("mlflow_llm_engine_info", "What the engine runs on", labels=(*self.LABELS, *self.INFO))
        for entity, (labels, _) in zip(entities, found, strict=True):
            runs.add_metric((*labels, *(getattr(entity.engine.info, name) for name in self.INFO)), 1.0)
        yield runs

    RECORDS = (
        ("engine_memory_bytes", "Memory of a replica, estimated from its files until it is measured", "memory"),
        ("engine_start_seconds", "Duration of the last start, up to the first token", "start_seconds"),
    )

    def _memory(self, entities: list[Entity]) -> Iterator[Metric]:
        records = [((entity.endpoint, entity.entity), entity.engine.record()) for entity in entities]
        for name, text, field in self.RECORDS:
            gauge = GaugeMetricFamily(f"mlflow_llm_{name}", text, labels=self.LABELS)
            for labels, record in records:
                gauge.add_metric(labels, float(getattr(record, field) or 0))
            yield gauge
        text = "1 if the engine is unloaded; the reason says why"
        unloaded = GaugeMetricFamily("mlflow_llm_engine_unloaded", text, labels=(*self.LABELS, "reason"))
        unloads = CounterMetricFamily("mlflow_llm_engine_unloads", "Times it was unloaded", labels=self.LABELS)
        for labels, record in records:
            unloaded.add_metric((*labels, record.unloaded), float(bool(record.unloaded)))
            unloads.add_metric(labels, float(record.unloads))
        yield unloaded
        yield unloads


class LedgerCollector(Collector):
    """A collector of the state of a ledger and its store."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def collect(self) -> Iterator[Metric]:
        found = self.ledger.status()
        for name, text, value in (
            (
                "ledger_open_rows",
                "Open requests in the store, including those of ended processes",
                found.open_rows,
            ),
            ("ledger_spooled", "Settlements on this host that wait for the store", found.spooled),
            ("store_up", "1 if the store answers", found.answers),
        ):
            yield GaugeMetricFamily(f"mlflow_llm_{name}", text, value=float(value))
        if found.answers:
            text = "Weight of a key in the engine's fair queue, for keys whose weight is not 1"
            weights = GaugeMetricFamily("mlflow_llm_key_weight", text, labels=("key",))
            with contextlib.suppress(Unavailable):
                for key_id, weight in Keys(self.ledger.store).weights().items():
                    weights.add_metric((key_id,), float(weight))
                yield weights


_UNSHARED: WeakKeyDictionary[Entities, EngineCounters] = WeakKeyDictionary()  # for processes without a common directory


def exposition(endpoints: Entities, ledger: Ledger | None = None) -> bytes:
    """Return all metrics of all workers in Prometheus' text format. Raises ``ShuttingDown`` if the server has ended."""
    if DIRECTORY not in os.environ:
        return generate_latest(OWN) + _read(endpoints, _UNSHARED.setdefault(endpoints, EngineCounters()), ledger)
    directory = Path(os.environ[DIRECTORY])
    workers = CollectorRegistry()
    MultiProcessCollector(workers)  # type: ignore[no-untyped-call]
    try:
        with counters_locked(directory, exclusive=False):
            counted = generate_latest(workers)
        return counted + _read(endpoints, EngineCounters(directory), ledger)
    except FileNotFoundError:
        raise ShuttingDown("the server has ended; this worker still finishes its replies") from None


def _read(endpoints: Entities, counters: EngineCounters, ledger: Ledger | None) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineCollector(endpoints, counters))
    if ledger is not None:
        registry.register(LedgerCollector(ledger))
    return generate_latest(registry)
