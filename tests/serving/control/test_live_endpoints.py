"""Endpoints that change while the server runs: controller process, workers and engines follow the store, and no request
is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from instant_model import write_instant_model
from server_calls import BODY, asking, until
from server_processes import ENGINE, controllers, engines
from serving_process import INSTANT_CORE, Running, running

from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Store

STREAM = BODY | {"stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Return models by version; "broken" has no weights."""
    found = {}
    for version in ("1", "2", "3"):
        root = tmp_path_factory.mktemp(f"v{version}-")
        found[version] = write_instant_model(root, step_delay=0.005, load_delay=0.3)
    root = tmp_path_factory.mktemp("broken")
    found["broken"] = write_instant_model(root)
    Path(found["broken"].model_dir, "instant.json").unlink()
    return found


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('live') / 'serving.db'}"


@pytest.fixture(scope="module")
def live(versions: dict[str, Bundle], database: str) -> Iterator[Running]:
    """Yield a server of two workers whose endpoint ``assistant`` serves version 1."""
    state = str(Path(database.removeprefix("sqlite:///")).parent)
    with running(versions["1"], engine=ENGINE, workers=2, database=database, state_dir=state) as server:
        yield server


@pytest.fixture(scope="module")
def endpoints(versions: dict[str, Bundle], database: str) -> Iterator[EndpointStore]:
    """Return the server's endpoint store, with models that no registry knows."""
    store = Store(database)
    yield EndpointStore(store, locate=locator(versions))
    store.close()


def locator(versions: dict[str, Bundle]) -> Callable[[tuple], tuple[ModelSource, ...]]:
    """Return a locator of the models of ``versions``, which no registry knows."""

    def locate(entities: tuple) -> tuple[ModelSource, ...]:
        return tuple(
            ModelSource(uri=e.uri, bundle=versions[e.entity_version], engine=ENGINE, core=INSTANT_CORE)
            for e in entities
        )

    return locate


def config(*shares: tuple[str, int]) -> dict:
    """Return a config of versions with their percentages; entities are called v1, v2, …"""
    return {
        "served_entities": [{"name": f"v{v}", "entity_name": "instant", "entity_version": v} for v, _ in shares],
        "traffic_config": {"routes": [{"served_model_name": f"v{v}", "traffic_percentage": p} for v, p in shares]},
    }


def get(server: Running, path: str) -> dict:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=240) as answer:
        return json.load(answer)


def settled(server: Running, name: str = "assistant", seconds: float = 240) -> dict:
    """Return the endpoint's state once no update of it is in progress."""
    state = lambda: get(server, f"/api/2.0/serving-endpoints/{name}")["state"]  # noqa: E731
    until(lambda: state()["config_update"] != "IN_PROGRESS", seconds)
    return state()


def serve(server: Running, endpoints: EndpointStore, *shares: tuple[str, int]) -> None:
    """Have ``assistant`` serve these versions, and wait for it."""
    endpoints.update_config("assistant", config(*shares))
    assert settled(server) == {"ready": "READY", "config_update": "NOT_UPDATING"}


def served_by(server: Running, model: str = "assistant", headers: dict[str, str] | None = None) -> str:
    with asking(server, BODY | {"model": model, "max_tokens": 1}, headers=headers) as answer:
        assert answer.status == 200, answer.read()
        answer.read()
        return answer.headers["served-model-name"]


class Callers:
    """Callers in a closed loop, each streaming one reply after the other; ``replies`` names the server of each complete
    one.
    """

    def __init__(self, server: Running, number: int) -> None:
        self._server = server
        self._over = threading.Event()
        self.replies: list[str] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with asking(self._server, STREAM) as answer:
                    text = answer.read().decode()
                chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
                usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
                if answer.status != 200 or not text.rstrip().endswith("[DONE]") or usage["completion_tokens"] != 40:
                    self.failures.append(text[-300:])
                self.replies.append(answer.headers["served-model-name"])
            except Exception as error:
                self.failures.append(repr(error))

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.replies) >= len(self._threads))
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(240)


def test_an_update_drops_no_request(live: Running, endpoints: EndpointStore) -> None:
    """Under load the new version warms up, gets the traffic, and then the old engine ends; every reply is complete."""
    serve(live, endpoints, ("1", 100))
    with Callers(live, 6) as callers:
        serve(live, endpoints, ("2", 100))
        before = len(callers.replies)
        until(lambda: len(callers.replies) > before + 12)
        until(lambda: len(engines(live)) == 1)
    assert callers.failures == []
    assert callers.replies[0] == "v1"
    assert set(callers.replies[-3:]) == {"v2"}
    assert served_by(live) == "v2"


def test_a_failed_update_falls_back(live: Running, endpoints: EndpointStore) -> None:
    """A version that fails to load leaves the old one serving, with the reason in the state and the engine's output in
    its build log.
    """
    serve(live, endpoints, ("1", 100))
    with Callers(live, 2) as callers:
        endpoints.update_config("assistant", config(("broken", 100)))
        state = settled(live)
    assert (state["ready"], state["config_update"]) == ("READY", "UPDATE_FAILED")
    assert "instant.json" in state["message"]
    log = get(live, "/api/2.0/serving-endpoints/assistant/served-models/vbroken/build-logs")["logs"]
    assert "Traceback" in log
    assert "instant.json" in log
    assert callers.failures == []
    assert {served_by(live) for _ in range(4)} == {"v1"}
    until(lambda: len(engines(live)) == 1)


def test_traffic_is_split_and_sticks_when_asked(live: Running, endpoints: EndpointStore) -> None:
    """Traffic is split over two entities by percentage; a sticky key always gets the same one, and an entity's own name
    selects it.
    """
    serve(live, endpoints, ("2", 70), ("3", 30))
    shares = Counter(served_by(live) for _ in range(100))
    assert abs(shares["v2"] - 70) <= 6  # two workers, each within a few requests of its percentage
    assert shares["v2"] + shares["v3"] == 100
    by_key = {key: {served_by(live, headers={"X-Sticky-Key": key}) for _ in range(3)} for key in "abcdefgh"}
    assert all(len(who) == 1 for who in by_key.values())
    assert set.union(*by_key.values()) == {"v2", "v3"}
    assert {served_by(live, "v3") for _ in range(3)} == {"v3"}


def test_endpoints_come_and_go(live: Running, endpoints: EndpointStore) -> None:
    """A created endpoint answers in every worker once it is ready; a deleted one is a 404 and its engine ends."""
    endpoints.create({"name": "other", "config": config(("1", 100))})
    assert settled(live, "other")["ready"] == "READY"
    for _ in range(6):
        assert served_by(live, "other") == "v1"
    assert {model["id"] for model in get(live, "/v1/models")["data"]} >= {"assistant", "other", "other:pirate"}
    request = urllib.request.Request(f"{live.url}/api/2.0/serving-endpoints/other", method="DELETE")
    with urllib.request.urlopen(request, timeout=240) as answer:
        assert answer.status == 200

    def is_gone() -> bool:
        with asking(live, BODY | {"model": "other"}) as answer:
            answer.read()
            return answer.status == 404

    until(is_gone)
    until(lambda: all(is_gone() for _ in range(4)))


def test_a_killed_controller_process_is_started_again_and_no_request_is_lost(
    live: Running, endpoints: EndpointStore
) -> None:
    """A killed controller process is restarted; requests continue on the same engine, and a later update works."""
    serve(live, endpoints, ("2", 100))
    until(lambda: len(engines(live)) == 1)
    before = engines(live)
    (controller,) = controllers(live)
    with Callers(live, 2) as callers:
        os.kill(controller.pid, signal.SIGKILL)
        until(lambda: [p.pid for p in controllers(live)] not in ([], [controller.pid]))
        assert (served_by(live), engines(live)) == ("v2", before)
        serve(live, endpoints, ("3", 100))
    assert callers.failures == []
    assert served_by(live) == "v3"
    until(lambda: len(engines(live)) == 1)


def test_endpoints_outlive_their_server(versions: dict[str, Bundle], tmp_path: Path) -> None:
    """A restarted server serves the endpoints in the store beside those of its command line, and what was set over the
    API stays."""
    options = {"engine": ENGINE, "database": f"sqlite:///{tmp_path / 'serving.db'}", "state_dir": str(tmp_path)}
    with running(versions["1"], **options) as server:
        store = Store(options["database"])
        endpoints = EndpointStore(store, locate=locator(versions))
        tags = [{"key": "team", "value": "a"}]
        endpoints.create({"name": "kept", "config": config(("3", 100)), "tags": tags})
        assert settled(server, "kept")["ready"] == "READY"
        serve(server, endpoints, ("2", 100))
        store.close()
    with running(versions["1"], **options) as server:
        assert (served_by(server, "kept"), served_by(server, "assistant")) == ("v3", "v2")
        kept = get(server, "/api/2.0/serving-endpoints/kept")
        assert (kept["state"]["ready"], kept["tags"]) == ("READY", tags)


def test_a_model_logged_twice_is_one_engine(tmp_path: Path) -> None:
    """Two versions with the same content in separate files are served to two endpoints by one engine process."""
    (tmp_path / "1").mkdir()
    bundle = write_instant_model(tmp_path / "1")
    again = msgspec.structs.replace(bundle, model_dir=str(shutil.copytree(bundle.model_dir, tmp_path / "2")))
    more = EndpointSpec(name="b", entity="model-2", bundle=again, core=INSTANT_CORE, created=1, engine=ENGINE)
    with running(bundle, name="a", engine=ENGINE, more=(more,)) as server:
        assert [served_by(server, name) for name in "ab"] == ["model-1", "model-2"]
        assert len(engines(server)) == 1
