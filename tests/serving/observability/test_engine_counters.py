"""Engines' counters in a scrape: whatever ends, starts again or is asked, they never go back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from instant_model import write_instant_model
from prometheus_client.parser import text_string_to_metric_families
from scrapes import figures, pick
from server_calls import BODY, ask, engine_pid, until, well
from serving_process import running

from mlflow_llm.serving.interface.engine import Engine as EngineProtocol
from mlflow_llm.serving.interface.engine import EngineRecord, Health
from mlflow_llm.serving.observability import metrics
from mlflow_llm.serving.observability.engine_counters import FILE, MAX_ENGINES_KEPT, CounterDirectory, EngineCounters
from mlflow_llm.serving.routing.replica_set import ReplicaSet
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints, ServedEntity
from mlflow_llm.serving.transport.engine_process.counters import CounterWriter

PLACE = ("chat", "v1")
INFO = SimpleNamespace(pid=1, **dict.fromkeys(metrics.EngineCollector.INFO, ""))


class Engine:
    """An engine process with counters given by the test."""

    info, num_replicas = INFO, 1

    def __init__(self, generation: str, counted: int) -> None:
        self.processes = {generation: Health(status="ready", generated_tokens=counted)}

    def restarted(self, generation: str) -> None:
        self.processes[generation] = Health(status="ready")

    def health(self) -> Health:
        return next(reversed(self.processes.values()))

    def process_health(self) -> dict[str, Health]:
        return dict(self.processes)

    def close(self) -> None:
        pass


def worker(**engines: Engine) -> ServedEndpoints:
    """Return the endpoints of a worker that serves ``chat`` with the entity v1 on replicas."""
    replicas = ReplicaSet(INFO, (), open=engines.__getitem__, request_replica=lambda: None)
    replicas.set_addresses(tuple(engines))
    return ServedEndpoints(ServedEntity(endpoint="chat", entity="v1", view=None, engine=replicas))


def generated(endpoints: ServedEndpoints) -> float:
    families = text_string_to_metric_families(metrics.exposition(endpoints).decode())
    samples = [sample for family in families for sample in family.samples]
    return next(
        s.value for s in samples if s.name == "mlflow_llm_generated_tokens_total" and s.labels["entity"] == "v1"
    )


@pytest.fixture(params=["alone", "several workers"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "alone":
        monkeypatch.delenv(metrics.DIRECTORY, raising=False)
    else:
        monkeypatch.setenv(metrics.DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("directory")
def test_a_replica_that_leaves_takes_nothing_away() -> None:
    """Counters do not fall while a replica's last requests run, nor when it is released, and still count its tokens."""
    engines = {"one": Engine("a", 1_000_000), "other": Engine("b", 400)}
    endpoints = worker(**engines)
    replicas = next(iter(endpoints)).engine
    assert generated(endpoints) == 1_000_400
    replicas.set_addresses(("one",))
    assert generated(endpoints) == 1_000_400
    engines["other"].processes["b"] = Health(status="ready", generated_tokens=500)
    replicas.release_idle()
    assert generated(endpoints) == 1_000_500


@pytest.mark.usefixtures("directory")
def test_an_engine_that_starts_again_counts_on() -> None:
    """Counters go on from the old process's values when an engine restarts from 0, even between two scrapes."""
    engines = {"one": Engine("a", 1_000_000), "other": Engine("b", 400)}
    endpoints = worker(**engines)
    engines["one"].restarted("c")
    assert generated(endpoints) == 1_000_400
    engines["one"].processes["c"] = Health(status="ready", generated_tokens=7)
    assert generated(endpoints) == 1_000_407


def test_every_worker_shows_the_same_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer worker, or one with an older heartbeat, shows counters no smaller than those scraped before."""
    monkeypatch.setenv(metrics.DIRECTORY, str(tmp_path))
    assert generated(worker(one=Engine("a", 1_000_000))) == 1_000_000
    assert generated(worker(one=Engine("a", 999_990))) == 1_000_000
    assert generated(worker(one=Engine("b", 5))) == 1_000_005
    assert generated(worker(one=Engine("a", 1_000_001))) == 1_000_006
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, "figures.lock"]


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The file's size is bounded: of engine processes no longer seen only the sum is kept."""
    counters = EngineCounters(tmp_path)
    lasting = Health(status="ready", steps=1)
    for number in range(3 * MAX_ENGINES_KEPT):
        figures = {"lasting": lasting, f"g{number}": Health(status="dead", steps=2)}
        assert counters.merge([(PLACE, figures)])[PLACE]["steps"] == 1 + 2 * (number + 1)
    assert (tmp_path / FILE).stat().st_size < 50 * MAX_ENGINES_KEPT
    assert len(counters.known["chat"]["v1"]) == MAX_ENGINES_KEPT + 1


def test_counter_files_of_engines_are_summed(tmp_path: Path) -> None:
    """An entity's counters sum those of unconnected and unseen processes and of former versions; older heartbeats
    change nothing, and other entities get none of it.
    """
    kept, counters = CounterDirectory(tmp_path), EngineCounters(tmp_path)
    for key, place in (("first", PLACE), ("second", PLACE), ("third", ("chat", "v2"))):
        kept.assign(place, key)
        for engine in ("a", "b"):
            counted = CounterWriter(f"{key}-{engine}")
            counted.keep({kept.root(key), ""}, Health(status="ready", steps=1, generated_tokens=100))
    seen = {"first-a": Health(status="ready", generated_tokens=7), "far": Health(status="ready", generated_tokens=9)}
    for _ in range(2):
        sums = counters.merge([(PLACE, seen)])[PLACE]
        assert (sums["steps"], sums["generated_tokens"]) == (4, 409)
    counted.write(Health(status="ready", generated_tokens=105))
    assert counters.merge([(("chat", "v2"), {})])["chat", "v2"]["generated_tokens"] == 205


def test_counters_that_cannot_be_written_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If counters cannot be written this is logged, no file is made, and the engine goes on."""
    counted, health = CounterWriter("a"), Health(status="ready")
    counted.keep({str(tmp_path / "gone")}, health)
    counted.write(health)
    assert "counters cannot be stored" in caplog.text
    assert list(tmp_path.iterdir()) == []
    counted.keep(set(), health)


def test_an_engine_without_generations_is_counted_as_one() -> None:
    """An engine without generations counts as one process, and two such replicas as two."""

    def engine() -> Any:
        made = SimpleNamespace(
            info=INFO,
            health=lambda: Health(status="ready", generated_tokens=3),
            close=lambda: None,
            record=EngineRecord,
        )
        made.num_replicas, made.process_health = 1, lambda: EngineProtocol.process_health(made)
        return made

    assert generated(ServedEndpoints(ServedEntity(endpoint="chat", entity="v1", view=None, engine=engine()))) == 3
    assert generated(worker(one=engine(), other=engine())) == 6


def test_counters_outlive_a_killed_engine(tmp_path: Path) -> None:
    """After a kill -9 every worker's scrapes show at least the tokens generated before, all of the dead engine's at
    once, and then more.
    """
    bundle = write_instant_model(tmp_path / "model", step_delay=0.002)
    name = "mlflow_llm_generated_tokens_total"
    with running(bundle, workers=2) as server:
        for _ in range(4):
            ask(server, BODY)
        pid = engine_pid(server)
        os.kill(pid, signal.SIGKILL)
        before = pick(figures(server), name)
        assert before >= 4 * 8
        seen = [before]
        until(lambda: bool(seen.append(pick(figures(server), name))) or (well(server) and engine_pid(server) != pid))
        for _ in range(4):
            ask(server, BODY)
        until(lambda: bool(seen.append(pick(figures(server), name))) or seen[-1] >= before + 4 * 8)
    assert seen == sorted(seen)
