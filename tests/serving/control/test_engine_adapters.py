"""Adapters of served entities: what their engines are told, and what the plan says of them."""

from __future__ import annotations

import msgspec
import pytest

from mlflow_llm.serving.control.adapters import TAKEN, UNPINNED, EngineAdapters
from mlflow_llm.serving.control.deployed import DeployedEndpoint, DeployedEntity
from mlflow_llm.serving.control.plan import Plan, PlannedAdapter
from mlflow_llm.serving.endpoints.adapters import DynamicAdapter
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import Health
from mlflow_llm.serving.interface.errors import NotFound
from mlflow_llm.serving.supervision.adapter_sync import WantedAdapter, WantedAdapters
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus

LEGAL = DynamicAdapter(name="legal", uri="/a", path="/a", revision="1")
NEWER = msgspec.structs.replace(LEGAL, revision="2")
PLANNED = PlannedAdapter(name="legal", revision="1")


class Told:
    """A stand-in for the supervisor of the engine "key"."""

    def __init__(self) -> None:
        self.wanted: dict[str, WantedAdapters] = {}

    def set_adapters(self, key: str, adapters: WantedAdapters) -> None:
        if key != "key":
            raise NotFound(key)
        self.wanted[key] = adapters


def deployed(name: str = "chat") -> DeployedEndpoint:
    bundle = Bundle(content_hash="h", tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
    config = EntityConfig(name="e", entity_name="m", entity_version="1", source=ModelSource(uri="m", bundle=bundle))
    entity = DeployedEntity(endpoint=name, version=1, config=config, key="key")
    whole = EndpointConfig(served_entities=(config,), routes=())
    return DeployedEndpoint(name=name, id=name, created=0, version=1, config=whole, entities=(entity,))


def status(*replicas: tuple[str, dict[str, str]], wanted: int = 2, refused: str = "") -> EngineStatus:
    each = tuple(
        ReplicaStatus(
            index=i,
            address=str(i),
            state=state,  # type: ignore[arg-type]
            health=Health(status="ready"),
            adapters=adapters,
            refused_adapters={"legal": (refused, "it does not fit")} if refused else {},
        )
        for i, (state, adapters) in enumerate(replicas)
    )
    return EngineStatus(entity="key", wanted=wanted, replicas=each)


@pytest.fixture
def adapters() -> EngineAdapters:
    found = EngineAdapters(Plan())
    found.want({"chat": (LEGAL,)}, [deployed()], Told())  # type: ignore[arg-type]
    return found


def planned(adapters: EngineAdapters, found: EngineStatus, before: tuple = (), name: str = "chat") -> tuple:
    return adapters.planned(deployed(name).entities[0], found, before)


def test_an_adapter_is_planned_when_every_ready_replica_has_it(adapters: EngineAdapters) -> None:
    """An adapter enters the plan once every ready replica has it and stays while one restarts; without any wanted
    replica it is planned at once.
    """
    have, lack = {"legal": "1"}, {}
    assert planned(adapters, status(("ready", have), ("ready", have))) == ((PLANNED,), ())
    assert planned(adapters, status(("ready", have), ("ready", lack))) == ((), ())
    assert planned(adapters, status(("ready", have), ("starting", lack))) == ((PLANNED,), ())
    assert planned(adapters, status(("starting", lack), wanted=1), (PLANNED,)) == ((PLANNED,), ())
    assert planned(adapters, status(("starting", lack), wanted=1)) == ((), ())
    assert planned(adapters, status(wanted=0)) == ((PLANNED,), ())


def test_a_refusal_is_said_and_a_replacement_waited_for(adapters: EngineAdapters) -> None:
    """One replica's refusal is the adapter's; while a new revision loads, the name still means the old one."""
    refusal = PlannedAdapter(name="legal", revision="1", refusal="it does not fit")
    assert planned(adapters, status(("ready", {}), refused="1"))[0] == (refusal,)
    adapters.want({"chat": (NEWER,)}, [deployed()], Told())  # type: ignore[arg-type]
    assert planned(adapters, status(("ready", {"legal": "1"})), (PLANNED,)) == ((PLANNED,), ())
    newer = PlannedAdapter(name="legal", revision="2")
    assert planned(adapters, status(("ready", {"legal": "2"})), (PLANNED,)) == ((newer,), ())


def test_unwanted_adapters_are_withdrawn(adapters: EngineAdapters) -> None:
    """An adapter that is no longer wanted is withdrawn, even by a new controller process that knows it only from the
    old plan.
    """
    told = Told()
    adapters.want({}, [deployed()], told)  # type: ignore[arg-type]
    assert told.wanted["key"] == WantedAdapters(adapters={}, withdrawn=frozenset({"legal"}))
    assert planned(adapters, status(("ready", {"legal": "1"})), (PLANNED,)) == ((), ("legal",))


def test_endpoints_that_share_an_engine_share_its_names(adapters: EngineAdapters) -> None:
    """If two adapters have one name the first endpoint's is loaded and the other's refused, unless they are equal and
    shared.
    """
    told, other = Told(), msgspec.structs.replace(LEGAL, path="/b", revision="9")
    both = [deployed("poet"), deployed("chat")]
    adapters.want({"chat": (LEGAL,), "poet": (other,)}, both, told)  # type: ignore[arg-type]
    assert told.wanted["key"].adapters == {"legal": WantedAdapter(path="/a", revision="1")}
    found = status(("ready", {"legal": "1"}))
    assert planned(adapters, found) == ((PLANNED,), ())
    assert planned(adapters, found, name="poet")[0][0].refusal == TAKEN
    pinned = msgspec.structs.replace(LEGAL, revision="7", pinned=True)
    adapters.want({"chat": (LEGAL,), "poet": (pinned,)}, both, told)  # type: ignore[arg-type]
    assert planned(adapters, found, name="poet")[0][0].refusal == UNPINNED
    adapters.want({"chat": (pinned,), "poet": (LEGAL,)}, both, told)  # type: ignore[arg-type]
    assert told.wanted["key"].adapters["legal"].pinned
    adapters.want({"chat": (LEGAL,), "poet": (NEWER,)}, both, told)  # type: ignore[arg-type]
    assert planned(adapters, found, name="poet") == ((PlannedAdapter(name="legal", revision="2"),), ())
