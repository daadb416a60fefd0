"""Provisioned throughput on a real server: reserves beside pay-per-token, the bill, zero replicas and back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from instant_model import write_instant_model
from server_calls import asking, until
from serving_process import INSTANT_CORE, Running, running

from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Price, Prices, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.store.tables import buckets, provisioned_minutes

ENGINE = EngineSettings(idle_timeout=0.2)
PROMPT = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('provisioned') / 'ledger.db'}")
    prices = Prices(store)
    prices.set("*", Price(input=10**6, output=10**6, unit_minute=3))
    yield store
    store.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Return two models: ``shared`` loads at once and ``slow`` in 1.5 s; both take 2 ms a step and never stop early."""
    root: Path = tmp_path_factory.mktemp("models")
    model = {"step_delay": 0.002, "vocab_size": 94}
    delays = {"shared": 0.0, "slow": 1.5}
    return {name: write_instant_model(root / name, load_delay=d, **model) for name, d in delays.items()}


@pytest.fixture(scope="module")
def server(store: Store, models: dict[str, Bundle]) -> Iterator[Running]:
    """Yield a server of three endpoints: ``assistant`` is pay-per-token; ``reserved`` shares its engine with 50
    tokens/s reserved; ``sleepy`` loads in 1.5 s, runs one request, queues two and may scale to zero after 1.5 s.
    """
    few = EngineSettings(idle_timeout=0.2, max_num_seqs=1)
    reserve = {"min_provisioned_throughput": 50, "max_provisioned_throughput": 50, "core": INSTANT_CORE}
    more = (
        EndpointSpec(
            name="reserved",
            entity="model-r",
            bundle=models["shared"],
            engine=ENGINE,
            profile="databricks-pay-per-token",  # of which the entity's mode takes what it has
            **reserve,
        ),
        EndpointSpec(
            name="sleepy", entity="model-s", bundle=models["slow"], engine=few, scale_to_zero_enabled=True, **reserve
        ),
    )
    url = f"sqlite:///{store.engine.url.database}"
    state = str(Path(url.removeprefix("sqlite:///")).parent / "state")
    own = {"database": url, "state_dir": state, "max_queued": 2, "scale_to_zero_after": 1.5}
    with running(models["shared"], engine=ENGINE, more=more, **own) as server:
        yield server


def ask(server: Running, endpoint: str, **body: Any) -> tuple[int, dict[str, Any], Any]:
    """Return status, body and headers of a completion."""
    with asking(server, PROMPT | body, path=f"/serving-endpoints/{endpoint}/invocations") as answer:
        return answer.status, json.loads(answer.read()), answer.headers


def test_fields_follow_the_mode_of_the_endpoint(server: Running) -> None:
    """n is accepted by the provisioned endpoint alone and error_behavior by the pay-per-token one; otherwise they are a
    400 with the reason.
    """
    status, reply, _ = ask(server, "reserved", n=2)
    assert (status, len(reply["choices"])) == (200, 2)
    assert ask(server, "assistant", error_behavior="truncate")[0] == 200
    status, reply, _ = ask(server, "assistant", n=2)
    assert (status, reply["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "n: 2" in reply["message"]
    assert "provisioned" in reply["message"]
    status, reply, _ = ask(server, "reserved", error_behavior="truncate")
    assert (status, reply["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "error_behavior: 'truncate'" in reply["message"]
    assert "pay-per-token" in reply["message"]


def test_reserved_time_is_billed_and_its_tokens_are_not(server: Running, store: Store) -> None:
    """A provisioned request is in the ledger with its tokens and costs nothing; its minutes cost units x price."""
    for endpoint in ("reserved", "assistant"):
        assert ask(server, endpoint)[0] == 200
    by_mode = lambda: {row.mode: row for row in Usage(store).rows(UsageFilter()) if row.status == "ok"}  # noqa: E731
    until(lambda: len(by_mode()) == 2)
    assert by_mode()["provisioned"].cost == 0
    assert by_mode()["pay_per_token"].cost > 0
    assert by_mode()["provisioned"].completion_tokens > 0
    table = provisioned_minutes.c
    query = sa.select(table.units, table.cost).where(table.endpoint == "reserved")
    minutes = store.read(lambda connection: connection.execute(query).all())
    assert minutes
    assert {tuple(row) for row in minutes} <= {(50, 150), (80, 240)}


def test_a_request_draws_from_the_reserve_and_gives_back(server: Running, store: Store) -> None:
    """A running request lowers its endpoint's reserve bucket by what it may use; other endpoints have no bucket."""
    bucket = sa.select(buckets.c.level_milli).where(buckets.c.subject == "reserved\nmodel-r")
    level = lambda: store.read(lambda connection: connection.execute(bucket).scalar_one())  # noqa: E731
    assert ask(server, "reserved")[0] == 200
    with asking(
        server, PROMPT | {"max_tokens": 2000, "stream": True}, path="/serving-endpoints/reserved/invocations"
    ) as answer:
        answer.readline()
        low = level()
    until(lambda: level() > low + 1_000_000)
    subjects = store.read(lambda connection: connection.execute(sa.select(buckets.c.subject)).scalars().all())
    assert not [subject for subject in subjects if subject.startswith("assistant")]


def engine_pids(server: Running) -> set[int]:
    """Return the engines' process ids, 0 for one that is just being started."""
    return {int(json.loads(path.read_text())["pid"]) for path in server.runtime.glob("*/status.json")}


def engines(server: Running) -> int:
    return len(list(server.runtime.glob("*/spec.json")))


def test_an_idle_entity_scales_to_zero_and_back(server: Running) -> None:
    """An idle engine ends; the next requests wait for a new one and are answered up to the queue's size, and one more
    gets a Retry-After.
    """
    until(lambda: engines(server) == 1)
    awake = engine_pids(server)
    answers: list[tuple[int, dict[str, Any], Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, "sleepy"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: bool(engine_pids(server) - awake - {0}))
    (loading,) = engine_pids(server) - awake - {0}
    os.kill(loading, signal.SIGSTOP)  # until all have come
    try:
        until(lambda: bool(answers))
        ((status, reply, headers),) = answers
        assert status == 503, reply
        assert int(headers["Retry-After"]) >= 1
    finally:
        os.kill(loading, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert [status for status, _, _ in answers] == [503, 200, 200, 200]
    assert ask(server, "sleepy")[0] == 200


def reserving(throughput: int) -> dict[str, Any]:
    entity = {"name": "model-r", "entity_name": "instant", "entity_version": "1"}
    reserve = {"min_provisioned_throughput": throughput, "max_provisioned_throughput": throughput}
    return {"served_entities": [entity | reserve]}


def test_a_reserve_is_changed_while_it_is_served(server: Running, store: Store, models: dict[str, Bundle]) -> None:
    """A reserve above the machine's capacity fails with the field and the measurement while the old one is still
    served; a feasible one replaces it, on the bill too.
    """

    def locate(entities: tuple[Any, ...]) -> tuple[ModelSource, ...]:
        return tuple(
            ModelSource(uri=e.uri, bundle=models["shared"], engine=ENGINE, core=INSTANT_CORE) for e in entities
        )

    endpoints = EndpointStore(store, locate=locate)
    state = lambda: endpoints.get("reserved")["state"]  # noqa: E731
    endpoints.update_config("reserved", reserving(10**8))
    until(lambda: state()["config_update"] == "UPDATE_FAILED")
    assert "min_provisioned_throughput: 100000000" in state()["message"]
    assert "measured" in state()["message"]
    assert ask(server, "reserved")[0] == 200
    endpoints.update_config("reserved", reserving(80))
    until(lambda: state()["config_update"] == "NOT_UPDATING")
    assert ask(server, "reserved", n=2)[0] == 200
    table = provisioned_minutes.c
    units = sa.select(sa.func.max(table.units)).where(table.endpoint == "reserved")
    until(lambda: store.read(lambda connection: connection.execute(units).scalar_one()) == 80)
