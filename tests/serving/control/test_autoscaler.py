"""The autoscaler's measurements, reservations, scaling and billing of provisioned entities, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from mlflow_llm.serving.control import autoscaler as scaling
from mlflow_llm.serving.control.autoscaler import Autoscaler
from mlflow_llm.serving.control.deployed import DeployedEntity
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import Capabilities, Health
from mlflow_llm.serving.interface.errors import InvalidField, Unavailable
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Keys, Price, Prices, Store
from mlflow_llm.serving.metering.store.tables import provisioned_minutes
from mlflow_llm.serving.modes import billing
from mlflow_llm.serving.modes.billing import ReservedTime
from mlflow_llm.serving.modes.calibration import Capacity, calibrate
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus
from mlflow_llm.serving.testing.instant_core import InstantModel, write_model
from mlflow_llm.serving.testing.instant_engine import InstantEngine

FACTS = {"tokens_per_second": 100, "prompt_weight_milli": 500, "replica_limit": 4}


def served(name: str = "chat", version: int = 1, **fields: object) -> DeployedEntity:
    bundle = Bundle(content_hash="x", tasks=("completions",), model_dir="m", tokenizer_dir="m")
    source = ModelSource(uri="models:/m/1", bundle=bundle, engine=EngineSettings(threads=1))
    entity = EntityConfig(name="m-1", entity_name="m", entity_version="1", source=source, **fields)
    return DeployedEntity(endpoint=name, version=version, config=entity, key=f"key-{name}")


def status(replicas: int, **health: int) -> EngineStatus:
    """Return a status in which all existing replicas are ready and the first has ``health``."""
    first, rest = Health(status="ready", **health), Health(status="ready")
    each = tuple(
        ReplicaStatus(index=index, address=f"/{index}", state="ready", health=rest if index else first)
        for index in range(replicas)
    )
    return EngineStatus(entity="key", wanted=replicas, replicas=each)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Have every engine measure 100 tokens/s on a machine with CPUs for four, and return the engines measured."""
    engines: list[object] = []

    def calibrated(engine: object) -> Capacity:
        engines.append(engine)
        return Capacity(decode_tokens_per_second=100, prefill_tokens_per_second=200)

    monkeypatch.setattr(scaling, "calibrate", calibrated)
    monkeypatch.setattr(scaling, "replicas_on_this_machine", lambda entity: 4)
    return engines


def engine_like(**can: bool) -> SimpleNamespace:
    """Return the part of an engine that ``prepare`` reads of one that is not measured."""
    return SimpleNamespace(info=SimpleNamespace(backend="other", capabilities=Capabilities(**can)))


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(f"sqlite:///{tmp_path}/metering.db")
    yield opened
    opened.close()


@pytest.fixture
def reserved_time(store: Store) -> ReservedTime:
    return ReservedTime(store, now=lambda: 6000.0)


def test_an_entity_is_measured_once_for_an_engine(measured: list[object], reserved_time: ReservedTime) -> None:
    """An entity's facts are measured once for an engine: another version on the same engine is not measured again."""
    autoscaler, engine = Autoscaler(reserved_time), engine_like()
    limits = {"min_provisioned_throughput": 150, "max_provisioned_throughput": 300}
    assert autoscaler.prepare(served(**limits), engine) == FACTS
    assert autoscaler.prepare(served(version=2, **limits), engine) == FACTS
    assert measured == [engine]
    assert autoscaler.prepare(served("other"), engine_like()) == {}
    assert measured == [engine]


def test_throughput_above_the_capacity_is_refused(measured: list[object], reserved_time: ReservedTime) -> None:
    """More throughput than the machine has is refused with the field's name, the value and what was measured."""
    fields = {"min_provisioned_throughput": 401, "max_provisioned_throughput": 500}
    with pytest.raises(InvalidField, match=r"^min_provisioned_throughput: 401 .*at most 400 tokens/s.*measured"):
        Autoscaler(reserved_time).prepare(served(**fields), engine_like())


def test_without_a_ledger_nothing_is_reserved(measured: list[object]) -> None:
    """Without a ledger provisioned throughput is refused with what is missing, before anything is measured."""
    with pytest.raises(InvalidField, match=r"^max_provisioned_throughput: 500 .*--database"):
        Autoscaler().prepare(served(max_provisioned_throughput=500), engine_like())
    with pytest.raises(InvalidField, match=r"^min_provisioned_throughput: 500 .*--database"):
        Autoscaler().prepare(served(min_provisioned_throughput=500, max_provisioned_throughput=500), engine_like())
    assert measured == []


def test_an_engine_that_keeps_no_pace_reserves_nothing(measured: list[object], reserved_time: ReservedTime) -> None:
    """Provisioned throughput on an engine that cannot keep a pace is refused with the field and the engine."""
    with pytest.raises(InvalidField, match=r"^max_provisioned_throughput: 500 .*none of an engine of backend 'other'"):
        Autoscaler(reserved_time).prepare(served(max_provisioned_throughput=500), engine_like(provisioned=False))
    assert measured == []


def test_all_reserves_fit_the_machine_together(measured: list[object], reserved_time: ReservedTime) -> None:
    """Reserved throughput is unavailable to others until it is released; a new version replaces the old reservation."""
    autoscaler = Autoscaler(reserved_time)
    first, second = served("a", min_provisioned_throughput=300), served("b", min_provisioned_throughput=200)
    first, second = (
        msgspec.structs.replace(s, config=msgspec.structs.replace(s.config, max_provisioned_throughput=400))
        for s in (first, second)
    )
    autoscaler.prepare(first, engine_like())
    with pytest.raises(InvalidField, match=r"^min_provisioned_throughput: 200 .*at most 100 tokens/s"):
        autoscaler.prepare(second, engine_like())
    autoscaler.prepare(msgspec.structs.replace(first, version=2), engine_like())
    autoscaler.forget(first)
    autoscaler.forget(msgspec.structs.replace(first, version=2))
    autoscaler.prepare(second, engine_like())


def test_an_entity_that_is_not_provisioned_has_one_replica() -> None:
    """An entity that is not provisioned has one replica at any load, and none if it may scale to zero and was idle long
    enough.
    """
    autoscaler = Autoscaler(idle_seconds=10)
    busy = status(1, num_running=64, num_waiting=100, generated_tokens=10_000)
    assert autoscaler.step(served(), {}, busy, None, 0.0) == 1
    zero = served("zero", scale_to_zero_enabled=True)
    assert [autoscaler.step(zero, {}, status(1), None, float(now)) for now in (0, 9, 10)] == [1, 1, 0]
    assert autoscaler.step(zero, {}, status(0), 5.0, 11.0) == 0
    assert autoscaler.step(zero, {}, status(0), 11.9, 12.0) == 1


def test_demand_within_the_reserve_adds_replicas_and_its_end_takes_them_away() -> None:
    """Demand within the reserve adds replicas and its end removes them; other entities' load does not count, and
    prompts count by weight.
    """
    autoscaler = Autoscaler(settle_seconds=20)
    one = served(min_provisioned_throughput=50, max_provisioned_throughput=400)
    tokens = {
        "provisioned_tokens": 0,
        "provisioned_prompt_tokens": 0,
        "generated_tokens": 0,
        "num_running": 5,
        "steps": 0,
    }
    replicas, now = 1, 0.0

    def run(seconds: int, **each: int) -> None:
        nonlocal replicas, now
        for _ in range(seconds):
            now += 1
            for name, more in each.items():
                tokens[name] += more
            replicas = autoscaler.step(one, FACTS, status(replicas, **tokens), None, now)

    run(30, generated_tokens=5_000, steps=10)
    assert replicas == 1
    run(30, provisioned_tokens=100, provisioned_prompt_tokens=200, steps=10)
    assert replicas == 3
    run(300, provisioned_tokens=10, steps=10)
    assert replicas == 1


def test_a_request_during_zero_starts_the_first_replica_and_only_it() -> None:
    """Requests to an entity without replicas start one, however many requests there are while it starts."""
    autoscaler = Autoscaler(idle_seconds=5)
    one = served(min_provisioned_throughput=50, max_provisioned_throughput=400, scale_to_zero_enabled=True)
    for now in range(7):
        replicas = autoscaler.step(one, FACTS, status(1), None, float(now))
    assert replicas == 0
    starting = EngineStatus(entity="key", wanted=1, replicas=())
    for now in range(10, 20):
        assert autoscaler.step(one, FACTS, starting, now - 0.5, float(now)) == 1


def minutes(store: Store) -> list[tuple[int, str, int, int]]:
    table = provisioned_minutes.c
    query = provisioned_minutes.select().order_by(table.minute)
    rows = store.read(lambda connection: connection.execute(query).all())
    return [(row.minute, row.tenant, row.units, row.cost) for row in rows]


def test_reserved_time_is_billed_by_the_minute(store: Store) -> None:
    """Every minute in which a replica was ready is billed to the creator's tenant by its largest reserved tokens/s."""
    now = 6000.0
    Prices(store, clock=lambda: now).set("m-1", Price(unit_minute=7))
    _, key = Keys(store).create("acme")
    row = {"name": "chat", "id": "1", "creator": key.key_id, "description": "", "tasks": "chat", "ready": "READY"}
    row |= {"config_update": "NOT_UPDATING", "message": "", "created_ms": 0, "updated_ms": 0, "last_version": 1}
    store.write(lambda connection: connection.execute(billing.endpoints.insert().values(**row)))
    autoscaler = Autoscaler(ReservedTime(store, now=lambda: now))
    one = served(min_provisioned_throughput=50, max_provisioned_throughput=150)
    for seconds, replicas in ((0, 1), (30, 2), (59, 1), (60, 1), (100, 1), (120, 0), (200, 3)):
        now = 6000.0 + seconds
        autoscaler.step(one, FACTS, status(replicas), None, now)
    assert minutes(store) == [
        (100, "acme", 150, 1050),
        (101, "acme", 100, 700),
        (103, "acme", 150, 1050),
    ]


def test_minutes_are_billed_once_the_store_answers_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is unavailable nothing is raised, and afterwards every minute is billed exactly once."""
    clock = iter((6000.0, 6060.0, 6121.0, 6130.0))
    now = 0.0
    reserved = ReservedTime(store, now=lambda: now)
    write = store.write

    def silent(*args: object, **kwargs: object) -> object:
        raise Unavailable("away")

    monkeypatch.setattr(store, "write", silent)
    for _ in range(3):
        now = next(clock)
        reserved.hold("chat", "m-1", 10)
    assert minutes(store) == []
    monkeypatch.setattr(store, "write", write)
    now = next(clock)
    reserved.hold("chat", "m-1", 10)
    assert [(minute, units) for minute, _, units, _ in minutes(store)] == [(100, 10), (101, 10), (102, 10)]


def test_calibration_of_an_engine_of_each_kind(tmp_path: Path) -> None:
    """Calibration measures a generating engine by generation and an embedding engine by embedding."""
    bundle = write_model(tmp_path / "m", InstantModel(step_delay=0.001))
    for tasks in (("completions",), ("embeddings",)):
        engine = InstantEngine(msgspec.structs.replace(bundle, tasks=tasks))
        found = calibrate(engine, callers=2, prompt_tokens=8, new_tokens=4)
        assert found.decode_tokens_per_second > 1
        assert found.prompt_weight_milli == 1000 or tasks == ("completions",)
