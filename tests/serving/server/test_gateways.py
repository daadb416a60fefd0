"""Two servers over one PostgreSQL database: one of them leads, and states of endpoints say what both serve."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from instant_model import write_instant_model
from postgres_databases import new_database
from server_calls import BODY, asking, until
from serving_process import INSTANT_CORE, Running, running

from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.gateways import Fence, NotLeader, leader_in
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store

ENGINE = EngineSettings(idle_timeout=0.3)
CONFIG = {"served_entities": [{"name": "model-1", "entity_name": "instant", "entity_version": "1"}]}


@pytest.fixture
def database(postgres_server: str) -> str:
    return new_database(postgres_server)


@pytest.fixture
def start(tmp_path: Path, database: str) -> Iterator[Callable[[str], Running]]:
    """Return a function that starts a gateway on a host (a state directory) of its own."""
    bundle = write_instant_model(tmp_path)
    with ExitStack() as servers:

        def call(host: str) -> Running:
            # a short path: Unix sockets' names are limited
            runtime = servers.enter_context(tempfile.TemporaryDirectory(prefix="mll-"))
            options: dict[str, Any] = {"state_dir": str(tmp_path / host), "runtime_dir": runtime}
            options["adapter_sources"] = str(tmp_path / "adapters")
            return servers.enter_context(running(bundle, engine=ENGINE, database=database, **options))

        yield call


def shown(server: Running) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/api/2.0/serving-endpoints/assistant", timeout=240) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def kill(server: Running) -> None:
    """Kill all processes of a server with SIGKILL, its engines included."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, 30)
    server.process.wait(240)


def load_adapter(server: Running, place: Path) -> None:
    """Load the adapter ``legal``, and expect to be told that it is everywhere."""
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(b"")
    with asking(server, {"lora_name": "legal", "lora_path": str(place)}, "/v1/load_lora_adapter") as answer:
        assert answer.status == 200, answer.read()
        answer.read()


def test_the_other_gateway_takes_over(start: Callable[[str], Running], database: str, tmp_path: Path) -> None:
    """When the leader is killed, the other gateway leads and finishes updates; the old leader's writes are refused."""
    servers = [start("first"), start("second")]
    until(lambda: [one["state"] for one in shown(servers[0])["gateways"]] == ["READY", "READY"])
    assert shown(servers[1])["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"}
    hashes = {one["content_hash"] for one in shown(servers[1])["gateways"]}
    assert len(hashes) == 1
    load_adapter(servers[0], tmp_path / "adapters" / "legal")
    (loaded,) = {tuple(found.items()) for one in shown(servers[1])["gateways"] for found in one["adapters"]}
    assert (dict(loaded)["name"], dict(loaded)["state"]) == ("legal", "LOADED")
    with asking(servers[1], BODY | {"model": "assistant:legal", "max_tokens": 3}) as answer:
        assert answer.status == 200, answer.read()
        answer.read()
    store = Store(database)
    source = ModelSource(uri="instant", bundle=write_instant_model(tmp_path / "2"), engine=ENGINE, core=INSTANT_CORE)
    endpoints = EndpointStore(store, locate=lambda found: (source,) * len(found))
    led = endpoints.gateways.lease()
    names = {one.gateway: one.name for one in endpoints.gateways.all()}
    leader = next(one for one in servers if names[led.holder].endswith(f":{one.port}"))
    (other,) = (one for one in servers if one is not leader)
    endpoints.update_config("assistant", CONFIG)
    until(lambda: shown(other)["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"})
    assert [one["config_version"] for one in shown(other)["gateways"]] == [2, 2]
    kill(leader)
    until(lambda: store.read(leader_in) not in ("", led.holder))
    with pytest.raises(NotLeader):
        endpoints.set_ready("assistant", False, fence=Fence(holder=led.holder, number=led.fence))
    endpoints.update_config("assistant", CONFIG)
    until(lambda: shown(other)["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"})
    (left,) = shown(other)["gateways"]
    assert (left["config_version"], left["gateway"].endswith(f":{other.port}")) == (3, True)
    with asking(other, BODY | {"max_tokens": 3}) as answer:
        assert answer.status == 200
        answer.read()
    store.close()
