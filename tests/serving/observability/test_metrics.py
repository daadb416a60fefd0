"""The metrics that Prometheus reads, after a known load, on a real server and through its workers' files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from instant_model import write_instant_model
from scrapes import Figures, figures, pick
from server_calls import BODY, ask, asking, health, until
from serving_process import Running, running

from mlflow_llm.serving.model_files.model_version import ModelVersion
from mlflow_llm.serving.observability.worker_counters import KINDS, merge_ended


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Figures, Running]]:
    """Return a server of two workers after a known load, and its metrics."""
    with running(write_instant_model(tmp_path_factory.mktemp("counted"), step_delay=0.002), workers=2) as server:
        known_load(server)
        yield figures(server), server


def known_load(server: Running) -> None:
    """Send 12 whole and 8 streamed chats of 8 tokens, 4 to an adapter, one refused by its endpoint and one before."""
    streamed = BODY | {"stream": True}
    adapted = streamed | {"model": "assistant:pirate"}
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda body: ask(server, body), [BODY] * 12 + [streamed] * 4 + [adapted] * 4))
    assert {status for status, _ in done} == {200}
    assert ask(server, BODY | {"messages": [{"role": "user", "content": "x" * 9000}]})[0] == 400
    assert ask(server, BODY | {"model": "nobody"})[0] == 404


def test_requests_are_counted_by_status(counted: tuple[Figures, Running]) -> None:
    """Requests are counted by endpoint, entity, adapter, task and status; one for no endpoint has none."""
    found, _ = counted
    name = "mlflow_llm_requests_total"
    chat = {"endpoint": "assistant", "entity": "model-1", "task": "chat", "status": "200"}
    assert pick(found, name, adapter="", **chat) == 16
    assert pick(found, name, adapter="pirate", **chat) == 4
    assert pick(found, name, endpoint="assistant", status="400") == 1
    assert pick(found, name, endpoint="", status="404") == 1


def test_tokens_are_counted_by_kind(counted: tuple[Figures, Running]) -> None:
    """The token counters equal the sums of the usages, by kind and adapter, and the engine's own counts."""
    found, server = counted
    usage = json.loads(ask(server, BODY)[1])["usage"]
    name = "mlflow_llm_tokens_total"
    for adapter, requests in (("", 16), ("pirate", 4)):
        labels = {"endpoint": "assistant", "entity": "model-1", "adapter": adapter}
        assert pick(found, name, kind="completion", **labels) == 8 * requests
        assert pick(found, name, kind="prompt", **labels) == usage["prompt_tokens"] * requests
        assert pick(found, name, kind="cached", **labels) == 0
    entity = {"endpoint": "assistant", "entity": "model-1"}  # by heartbeats, a moment later
    until(lambda: pick(figures(server), "mlflow_llm_generated_tokens_total", **entity) >= 8 * 20)


@pytest.mark.parametrize(
    ("name", "base", "adapted"),
    [
        ("mlflow_llm_request_seconds", 17, 4),
        ("mlflow_llm_time_to_first_token_seconds", 4, 4),
        ("mlflow_llm_time_per_output_token_seconds", 4, 4),
    ],
)
def test_histograms_have_an_observation_for_each_request(
    counted: tuple[Figures, Running], name: str, base: int, adapted: int
) -> None:
    """Each histogram has as many observations as requests it is about, cumulative buckets, and a sum that fits."""
    found, _ = counted
    for adapter, count in (("", base), ("pirate", adapted)):
        labels = {"endpoint": "assistant", "adapter": adapter}
        observations = pick(found, f"{name}_count", **labels)
        assert observations == count if "output" not in name else observations >= count
        rows = [
            (dict(has)["le"], v) for (n, has), v in found.items() if n == f"{name}_bucket" and labels.items() <= has
        ]
        buckets = sorted((float(le), value) for le, value in rows)
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1] == (float("inf"), observations)
        assert 0 < pick(found, f"{name}_sum", **labels) < 60 * observations


def test_engine_gauges(counted: tuple[Figures, Running]) -> None:
    """A scrape shows what runs now, and that the engine is ready and makes steps."""
    _, server = counted
    labels = {"endpoint": "assistant", "entity": "model-1"}
    with asking(server, BODY | {"stream": True, "max_tokens": 3000}) as answer:
        answer.readline()
        until(lambda: health(server)["running"] == 1)
        busy = figures(server)
        assert pick(busy, "mlflow_llm_running_sequences", **labels) == 1
    until(lambda: health(server)["running"] == 0)
    idle = figures(server)
    assert pick(idle, "mlflow_llm_engine_ready", **labels) == 1
    assert pick(idle, "mlflow_llm_replicas", **labels) == 1
    assert pick(idle, "mlflow_llm_engine_steps_total", **labels) > pick(busy, "mlflow_llm_engine_steps_total", **labels)
    until(lambda: pick(figures(server), "mlflow_llm_disconnects_total", endpoint="assistant") == 1)


def test_every_field_of_a_heartbeat_is_exposed() -> None:
    """Queue, KV use, prefix hits and the rest come from the heartbeat of each served entity, under its labels."""
    from types import SimpleNamespace

    from prometheus_client import CollectorRegistry

    from mlflow_llm.serving.interface.engine import EngineRecord, Health
    from mlflow_llm.serving.observability.engine_counters import EngineCounters
    from mlflow_llm.serving.observability.metrics import EngineCollector

    fields = ("steps", "last_step_age", "num_running", "num_waiting", "kv_tokens_used", "kv_tokens_total")
    fields += ("num_standbys", "prefix_hit_tokens", "prefix_query_tokens", "generated_tokens", "cpu_wait")
    fields += ("draft_tokens", "accepted_tokens", "num_tenants_waiting")
    heartbeat = Health(status="stalled", **{name: number for number, name in enumerate(fields, 1)})
    runs_on = {"kernels": "torch", "kernels_reason": "r", "instruction_set": "", "dtype": "float32"}
    runs_on |= {"quantization": "int8", "device": "cpu"}
    runs_on |= {"kv_cache_dtype": "float32", "kv_cache_reason": "whole keys and values"}
    runs = SimpleNamespace(
        health=lambda: heartbeat, num_replicas=3, info=SimpleNamespace(**runs_on), record=EngineRecord
    )
    runs.process_health = lambda: {"g": heartbeat}
    version = ModelVersion(name="m", version="7", content_hash="c" * 64)
    entity = SimpleNamespace(endpoint="a", entity="model", identity=version, engine=runs)
    registry = CollectorRegistry()
    registry.register(EngineCollector(SimpleNamespace(entities=lambda: [entity]), EngineCounters()))
    names = ("engine_steps_total", "last_step_age_seconds", "running_sequences", "waiting_requests", "kv_tokens_used")
    names += (
        "kv_tokens_total",
        "standbys",
        "prefix_hit_tokens_total",
        "prefix_query_tokens_total",
        "generated_tokens_total",
        "cpu_wait_ratio",
        "draft_tokens_total",
        "accepted_draft_tokens_total",
    )
    found = [registry.get_sample_value(f"mlflow_llm_{name}", {"endpoint": "a", "entity": "model"}) for name in names]
    assert found == list(range(1, 14))
    old = registry.get_sample_value("mlflow_llm_processor_wait_ratio", {"endpoint": "a", "entity": "model"})
    assert old == heartbeat.cpu_wait
    assert registry.get_sample_value("mlflow_llm_engine_ready", {"endpoint": "a", "entity": "model"}) == 0
    model = {"endpoint": "a", "entity": "model", "name": "m", "version": "7", "content_hash": "c" * 64}
    assert registry.get_sample_value("mlflow_llm_model_info", model) == 1
    assert registry.get_sample_value("mlflow_llm_replicas", {"endpoint": "a", "entity": "model"}) == 3
    labels = {"endpoint": "a", "entity": "model", **runs_on}
    assert registry.get_sample_value("mlflow_llm_engine_info", labels) == 1


def test_a_dead_workers_counts_are_kept_and_its_files_are_not(counted: tuple[Figures, Running]) -> None:
    """After a worker is killed its counts are still in the scrape, and its files are merged away."""
    import psutil

    _, server = counted
    before = pick(figures(server), "mlflow_llm_tokens_total", kind="completion")
    (directory,) = metrics_directories(server)
    pids = {int(path.stem.split("_")[1]) for path in directory.glob("counter_*.db") if path.stem != "counter_ended"}
    victim = psutil.Process(next(iter(pids)))
    victim.kill()
    files = [directory / f"{kind}_{victim.pid}.db" for kind in KINDS]  # moved one after the other
    until(lambda: not any(file.exists() for file in files) and (directory / "counter_ended.db").exists())
    until(lambda: ask_quietly(server) == 200)
    until(lambda: pick(figures(server), "mlflow_llm_tokens_total", kind="completion") >= before + 8)


def ask_quietly(server: Running) -> int:
    try:
        return ask(server, BODY)[0]
    except OSError:  # the killed worker's connection
        return 0


def metrics_directories(server: Running) -> list[Path]:
    import psutil

    variable = "PROMETHEUS_MULTIPROC_DIR"
    found = set()
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # just ended
            found |= {Path(child.environ()[variable])} if variable in child.environ() else set()
    return list(found)


WRITER = """
import sys
from prometheus_client import Counter, Histogram
requests = Counter("requests", "counted", ("endpoint",))
seconds = Histogram("seconds", "observed", ("endpoint",))
for _ in range(int(sys.argv[1])):
    requests.labels("a").inc()
    seconds.labels("a").observe(0.02)
"""


@pytest.fixture
def ended(tmp_path: Path) -> Callable[[int], int]:
    """Run a process that counts so many requests, and return its pid."""

    def run(count: int) -> int:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(count)], env=environment)
        assert process.wait(240) == 0
        return process.pid

    return run


def test_counters_of_ended_workers_are_merged(tmp_path: Path, ended: Callable[[int], int]) -> None:
    """Two ended workers become one file of each kind with the sums, histograms' buckets included."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    def scrape() -> bytes:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))
        return generate_latest(registry)

    pids = [ended(3), ended(4)]
    whole = scrape()
    assert b'requests_total{endpoint="a"} 7.0' in whole
    for pid in (*pids, 1):
        merge_ended(tmp_path, pid)
    merge_ended(tmp_path / "gone", 1)
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["counter_ended.db", "histogram_ended.db"]
    assert sorted(scrape().splitlines()) == sorted(whole.splitlines())


def test_a_worker_that_ended_when_it_had_just_made_its_files_counted_nothing(
    tmp_path: Path, ended: Callable[[int], int]
) -> None:
    """Empty or unwritten counter files of an ended worker are skipped, others are merged, and the arbiter goes on."""
    for kind in KINDS:
        (tmp_path / f"{kind}_1.db").touch()
        (tmp_path / f"{kind}_2.db").write_bytes(bytes(2**16))
    for pid in (1, ended(3), 2):
        merge_ended(tmp_path, pid)
    assert {path.name for path in tmp_path.glob("*.db")} == {f"{kind}_ended.db" for kind in KINDS}
    assert b"requests_total" in (tmp_path / "counter_ended.db").read_bytes()
