"""The reconciler: what fails of one endpoint is reported, and everything else goes on."""

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

from mlflow_llm.serving.control import rollout
from mlflow_llm.serving.control.autoscaler import Autoscaler
from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.control.reconciler import QUIET_TICK_SECONDS, TICK_SECONDS, Reconciler, reachable_addresses
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import Health
from mlflow_llm.serving.interface.errors import PackagingError, ServingError, Unavailable
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus, Supervisor

CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}


class Controller:
    """A reconciler with its own store and supervisor in this process. ``missing`` is the error of a model lookup."""

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
        self.plans = PlanDirectory(place)
        self.reconciler = Reconciler(self.endpoints, self.supervisor, self.plans, Autoscaler(), find=self._find)

    def _find(self, entity: EntityConfig) -> EntityConfig:
        if self.missing:
            raise PackagingError(self.missing)
        return entity

    def create(self, name: str) -> None:
        self.endpoints.create({"name": name, "config": CONFIG})

    def update(self, name: str) -> str:
        """Return the result of an endpoint's last update after one more reconciliation."""
        self.reconciler.tick()
        found: str = self.endpoints.get(name)["state"]["config_update"]
        return found

    def close(self) -> None:
        self.reconciler.close()
        self.supervisor.close()
        self._store.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    # a short path: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mlk-") as runtime:
        # without adapters, since their files are part of an engine's key
        bundle = msgspec.structs.replace(write_instant_model(tmp_path / "bundle"), adapters={})
        controller = Controller(tmp_path, runtime, bundle)
        yield controller
        controller.close()


def test_an_endpoint_that_is_deleted_as_its_rollout_fails(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint may be deleted between the reconciler's read of the store and its report of a failed rollout."""
    real = rollout.Rollout.poll
    deleted = []

    def poll(self: rollout.Rollout) -> rollout.Stage:
        stage = real(self)
        if stage == "failed" and not deleted:
            controller.endpoints.delete("chat")
            deleted.append(stage)
        return stage

    monkeypatch.setattr(rollout.Rollout, "poll", poll)
    controller.missing = "files are gone"
    controller.create("chat")
    until(lambda: bool(controller.reconciler.tick() or deleted))
    controller.missing = ""
    controller.create("other")
    until(lambda: controller.update("other") == "NOT_UPDATING")


def test_a_failure_is_reported_once_the_store_answers(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout failure that the store could not record is recorded once the store is available."""
    real, refusals = controller.endpoints.mark_failed, [Unavailable("the store is away"), ServingError("what is that")]

    def mark_failed(name: str, version: int, message: str, *, fence: object) -> bool:
        if refusals:
            raise refusals.pop()
        return real(name, version, message, fence=fence)  # type: ignore[arg-type]

    monkeypatch.setattr(controller.endpoints, "mark_failed", mark_failed)
    controller.missing = "files are gone"
    controller.create("chat")
    until(lambda: controller.update("chat") == "UPDATE_FAILED")
    assert not refusals


def test_a_plan_that_cannot_be_written_is_written_later(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk keeps an update back, and ends neither the reconciler nor the update."""
    real, refusals = PlanDirectory.publish, [OSError(28, "No space left on device")] * 2

    def publish(self: PlanDirectory, plan: object) -> None:
        if refusals:
            raise refusals.pop()
        real(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(PlanDirectory, "publish", publish)
    controller.create("chat")
    until(lambda: controller.update("chat") == "NOT_UPDATING")
    assert [endpoint.name for endpoint in controller.plans.read().endpoints] == ["chat"]


def test_an_endpoint_whose_engine_loads_no_more_fails(controller: Controller) -> None:
    """The update of an endpoint whose shared engine has died and cannot be restarted fails with the reason."""
    controller.create("one")
    until(lambda: controller.update("one") == "NOT_UPDATING")
    (key,) = controller.supervisor.entities()
    Path(controller.bundle.model_dir, "instant.json").unlink()
    pid = controller.supervisor.engine(key).info.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid) and not controller.supervisor.status(key).ready)
    controller.create("two")
    until(lambda: controller.update("two") == "UPDATE_FAILED")
    assert "instant.json" in str(controller.endpoints.get("two"))
    assert controller.update("one") == "NOT_UPDATING"


def test_a_plan_names_what_another_gateway_serves_and_this_one_cannot(controller: Controller) -> None:
    """An endpoint with an active config whose files are not found here is missing in the plan, until they are."""
    controller.missing = "files are gone"
    controller.create("chat")
    until(lambda: controller.update("chat") == "UPDATE_FAILED")
    controller.endpoints.update_config("chat", CONFIG)
    controller.endpoints.mark_ready("chat", 2)  # by another gateway of the database
    controller.reconciler.tick()
    plans = controller.plans
    assert (plans.read().endpoints, plans.read().missing) == ((), ("chat",))
    controller.reconciler.rollouts.clear()  # as the next attempt does
    controller.missing = ""
    until(lambda: bool(controller.update("chat")) and not plans.read().missing)
    assert [endpoint.name for endpoint in plans.read().endpoints] == ["chat"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_replicas_that_cannot_be_started_are_left_out_of_the_plan(elsewhere: bool) -> None:
    """Replicas that cannot be started leave the plan, except the last one, whose error its requests get."""

    def status(*states: str) -> EngineStatus:
        each = enumerate(states)
        replicas = tuple(
            ReplicaStatus(index=i, address=f"{i}{state}", state=state, health=Health(status="ready"), was_ready=True)  # type: ignore[arg-type]
            for i, state in each
        )
        return EngineStatus(entity="a", wanted=len(states), replicas=replicas)

    def planned(*states: str) -> list[str]:
        return [address[1:] for address in reachable_addresses(status(*states), elsewhere=elsewhere)]

    assert planned("ready", "failed") == ["ready"]
    assert planned("failed") == ["failed"]
    assert planned("starting", "failed") == (["starting", "failed"] if elsewhere else ["starting"])
    assert planned("ready", "starting") == (["ready"] if elsewhere else ["ready", "starting"])


def test_at_rest_it_looks_seldom(controller: Controller) -> None:
    """The store is polled more often only while a change is in progress."""
    assert controller.reconciler.pause == QUIET_TICK_SECONDS
    controller.create("chat")
    controller.reconciler.tick()
    assert controller.reconciler.pause == TICK_SECONDS < QUIET_TICK_SECONDS
    until(lambda: controller.update("chat") == "NOT_UPDATING")
    controller.reconciler.tick()
    assert controller.reconciler.pause == QUIET_TICK_SECONDS


def test_a_start_serves_an_endpoint_whose_alias_could_not_be_followed(controller: Controller) -> None:
    """The config that is declared is served; that the version of its alias cannot be is no failure of the start."""
    controller.create("chat")
    controller.endpoints.mark_ready("chat", 1)
    controller.endpoints.following.fail("chat", 1, "the weights are missing")
    controller.reconciler.start({"chat": controller.endpoints.config("chat", 1)})
    state = controller.endpoints.get("chat")["state"]
    assert (state["config_update"], state["message"]) == ("UPDATE_FAILED", "the weights are missing")
    assert [endpoint.name for endpoint in controller.plans.read().endpoints] == ["chat"]
