"""The keeper's look at everything: what fails of one endpoint is told, and everything else goes on."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from instant_model import write_instant_model
from processes import gone
from server_calls import until
from serving_process import INSTANT_CORE

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.control import rollout
from mlflow_llm.serving.control.autoscaler import Autoscaler
from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.control.reconciler import Reconciler, _addresses
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.engine.interface import Health
from mlflow_llm.serving.errors import PackagingError, ServingError, Unavailable
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.settings import EngineSettings
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus, Supervisor

CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}


class Keeper:
    """A controller with a store and a supervisor of its own, in this process. ``missing`` is why no model is found."""

    def __init__(self, place: Path, runtime: str, bundle: Bundle) -> None:
        self.missing = ""
        self.bundle = bundle
        self._store = Store(f"sqlite:///{place / 'serving.db'}")
        settings = EngineSettings(idle_timeout=0.3)
        self.endpoints = EndpointStore(
            self._store,
            locate=lambda entities: tuple(
                ModelSource(uri=entity.uri, bundle=bundle, engine=settings, core=INSTANT_CORE) for entity in entities
            ),
        )
        self.supervisor = Supervisor(state_dir=runtime)
        self.controller = Reconciler(
            self.endpoints, self.supervisor, PlanDirectory(place), Autoscaler(), find=self._find
        )

    def _find(self, entity: EntityConfig) -> EntityConfig:
        if self.missing:
            raise PackagingError(self.missing)
        return entity

    def create(self, name: str) -> None:
        self.endpoints.create({"name": name, "config": CONFIG})

    def update(self, name: str) -> str:
        """How the last update of an endpoint went, after one more look."""
        self.controller.tick()
        found: str = self.endpoints.get(name)["state"]["config_update"]
        return found

    def close(self) -> None:
        self.controller.close()
        self.supervisor.close()
        self._store.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    # a short path: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mlk-") as runtime:
        # without adapters, whose files are part of what an engine is known by
        bundle = msgspec.structs.replace(write_instant_model(tmp_path / "bundle"), adapters={})
        keeper = Keeper(tmp_path, runtime, bundle)
        yield keeper
        keeper.close()


def test_an_endpoint_that_is_deleted_as_its_rollout_fails(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes it between the keeper's look at the store and its word that the rollout failed."""
    real = rollout.Rollout.poll
    deleted = []

    def poll(self: rollout.Rollout) -> rollout.Stage:
        stage = real(self)
        if stage == "failed" and not deleted:
            keeper.endpoints.delete("chat")
            deleted.append(stage)
        return stage

    monkeypatch.setattr(rollout.Rollout, "poll", poll)
    keeper.missing = "files are gone"
    keeper.create("chat")
    until(lambda: bool(keeper.controller.tick() or deleted))
    keeper.missing = ""
    keeper.create("other")
    until(lambda: keeper.update("other") == "NOT_UPDATING")


def test_a_failure_is_told_once_the_store_answers(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away when a rollout fails hears of it later."""
    real, refusals = keeper.endpoints.mark_failed, [Unavailable("the store is away"), ServingError("what is that")]

    def mark_failed(name: str, version: int, message: str) -> bool:
        if refusals:
            raise refusals.pop()
        return real(name, version, message)

    monkeypatch.setattr(keeper.endpoints, "mark_failed", mark_failed)
    keeper.missing = "files are gone"
    keeper.create("chat")
    until(lambda: keeper.update("chat") == "UPDATE_FAILED")
    assert not refusals


def test_a_plan_that_cannot_be_written_is_written_later(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps an update back, and ends neither the keeper nor the update."""
    real, refusals = PlanDirectory.publish, [OSError(28, "No space left on device")] * 2

    def publish(self: PlanDirectory, plan: object) -> None:
        if refusals:
            raise refusals.pop()
        real(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(PlanDirectory, "publish", publish)
    keeper.create("chat")
    until(lambda: keeper.update("chat") == "NOT_UPDATING")
    assert [endpoint.name for endpoint in keeper.controller._plan_directory.read().endpoints] == ["chat"]


def test_an_endpoint_whose_engine_loads_no_more_fails(keeper: Keeper) -> None:
    """An endpoint of a model that another serves, but whose engine has died and cannot be started: it is told so."""
    keeper.create("one")
    until(lambda: keeper.update("one") == "NOT_UPDATING")
    (key,) = keeper.supervisor.entities()
    Path(keeper.bundle.model_dir, "instant.json").unlink()
    pid = keeper.supervisor.engine(key).info.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid) and not keeper.supervisor.status(key).ready)
    keeper.create("two")
    until(lambda: keeper.update("two") == "UPDATE_FAILED")
    assert "instant.json" in str(keeper.endpoints.get("two"))
    assert keeper.update("one") == "NOT_UPDATING"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_is_in_the_plan(elsewhere: bool) -> None:
    """What cannot be started is left out while there is another; the last one is not: its requests are to be told."""

    def status(*states: str) -> EngineStatus:
        each = enumerate(states)
        replicas = tuple(
            ReplicaStatus(index=i, address=f"{i}{state}", state=state, health=Health(status="ready"), proven=True)  # type: ignore[arg-type]
            for i, state in each
        )
        return EngineStatus(entity="a", wanted=len(states), replicas=replicas)

    def planned(*states: str) -> list[str]:
        return [address[1:] for address in _addresses(status(*states), elsewhere=elsewhere)]

    assert planned("ready", "failed") == ["ready"]
    assert planned("failed") == ["failed"]
    assert planned("starting", "failed") == (["starting", "failed"] if elsewhere else ["starting"])
    assert planned("ready", "starting") == (["ready"] if elsewhere else ["ready", "starting"])
