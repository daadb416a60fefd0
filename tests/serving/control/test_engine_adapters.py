"""Adapters of served entities: what their engines are told, and what the plan says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlflow_llm.serving.control.adapter_files import AdapterFiles
from mlflow_llm.serving.control.adapters import (
    FORGET_SECONDS,
    KEEP_SECONDS,
    OLD_SECONDS,
    TAKEN,
    UNPINNED,
    EngineAdapters,
)
from mlflow_llm.serving.control.deployed import DeployedEndpoint, DeployedEntity
from mlflow_llm.serving.control.plan import Plan, PlannedAdapter, PlannedEndpoint, PlannedEntity
from mlflow_llm.serving.endpoints.adapters import DynamicAdapter
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.errors import NotFound, Unavailable
from mlflow_llm.serving.model_files import adapter_contents, downloads
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
    found = EngineAdapters(Plan(), AdapterFiles(str))
    found.want({"chat": (LEGAL,)}, [deployed()], Told(), plan=Plan())  # type: ignore[arg-type]
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
    adapters.want({"chat": (NEWER,)}, [deployed()], Told(), plan=Plan())  # type: ignore[arg-type]
    assert planned(adapters, status(("ready", {"legal": "1"})), (PLANNED,)) == ((PLANNED,), ())
    newer = PlannedAdapter(name="legal", revision="2")
    assert planned(adapters, status(("ready", {"legal": "2"})), (PLANNED,)) == ((newer,), ())


def test_unwanted_adapters_are_withdrawn(adapters: EngineAdapters) -> None:
    """An adapter that is no longer wanted is withdrawn, even by a new controller process that knows it only from the
    old plan.
    """
    told = Told()
    adapters.want({}, [deployed()], told, plan=Plan())  # type: ignore[arg-type]
    assert told.wanted["key"] == WantedAdapters(adapters={}, withdrawn=frozenset({"legal"}))
    assert planned(adapters, status(("ready", {"legal": "1"})), (PLANNED,)) == ((), ("legal",))


def test_endpoints_that_share_an_engine_share_its_names(adapters: EngineAdapters) -> None:
    """If two adapters have one name the first endpoint's is loaded and the other's refused, unless they are equal and
    shared.
    """
    told, other = Told(), msgspec.structs.replace(LEGAL, path="/b", revision="9")
    both = [deployed("poet"), deployed("chat")]
    adapters.want({"chat": (LEGAL,), "poet": (other,)}, both, told, plan=Plan())  # type: ignore[arg-type]
    assert told.wanted["key"].adapters == {"legal": WantedAdapter(path="/a", revision="1")}
    found = status(("ready", {"legal": "1"}))
    assert planned(adapters, found) == ((PLANNED,), ())
    assert planned(adapters, found, name="poet")[0][0].refusal == TAKEN
    pinned = msgspec.structs.replace(LEGAL, revision="7", pinned=True)
    adapters.want({"chat": (LEGAL,), "poet": (pinned,)}, both, told, plan=Plan())  # type: ignore[arg-type]
    assert planned(adapters, found, name="poet")[0][0].refusal == UNPINNED
    adapters.want({"chat": (pinned,), "poet": (LEGAL,)}, both, told, plan=Plan())  # type: ignore[arg-type]
    assert told.wanted["key"].adapters["legal"].pinned
    adapters.want({"chat": (LEGAL,), "poet": (NEWER,)}, both, told, plan=Plan())  # type: ignore[arg-type]
    assert planned(adapters, found, name="poet") == ((PlannedAdapter(name="legal", revision="2"),), ())


FIRST, SECOND = "1" * 64, "2" * 64
OF_FIRST, OF_SECOND = f"legal@{FIRST[:32]}", f"legal@{SECOND[:32]}"


def stored(content_hash: str, revision: str = "1", **more: object) -> DynamicAdapter:
    """Return the adapter ``legal`` with a content in the store."""
    return msgspec.structs.replace(LEGAL, content_hash=content_hash, revision=revision, **more)


def in_plan(*adapters: PlannedAdapter) -> Plan:
    """Return a plan in which the endpoint ``chat`` has these adapters."""
    (entity,) = deployed().entities
    info = EngineInfo(content_hash="h", tasks=("chat",), vocab_size=1, max_model_len=1, max_num_seqs=1, max_kv_tokens=1)
    planned = PlannedEntity(config=entity.config, key="key", info=info, addresses=(), adapters=adapters)
    return Plan(
        generation=1,
        endpoints=(PlannedEndpoint(name="chat", id="chat", version=1, created=0, entities=(planned,), routes=()),),
    )


class AtOnce(Executor):
    """An executor whose work is done when it has been submitted."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **named))
        except Unavailable as error:
            done.set_exception(error)
        return done


class Place:
    """The adapters of a host with a clock that tests move, and contents that arrive when tests say so."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapter_contents, "local_path", lambda one: "")
        monkeypatch.setattr(downloads, "hold_paths", lambda paths: True)
        self.now, self.problem, self.fetched = 100.0, "", list[str]()
        self.files = AdapterFiles(self._fetch, monotonic=lambda: self.now, fetchers=AtOnce())
        self.adapters = EngineAdapters(Plan(), self.files, monotonic=lambda: self.now)
        self.told = Told()

    def _fetch(self, content_hash: str) -> str:
        self.fetched.append(content_hash)
        if self.problem:
            raise Unavailable(self.problem)
        return f"/cache/{content_hash[:4]}"

    def want(self, *adapters: DynamicAdapter, plan: Plan | None = None, is_adopted: bool = True) -> dict[str, str]:
        """Return the paths of the adapters that the engine is told to have, by its names."""
        for _ in range(2):  # the second time what was fetched is there
            self.adapters.want(
                {"chat": adapters},
                [deployed()],
                self.told,  # type: ignore[arg-type]
                plan=plan or Plan(),
                is_adopted=lambda: is_adopted,
            )
        return {name: one.path for name, one in self.told.wanted["key"].adapters.items()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path, monkeypatch)
    yield place
    place.adapters.close()


def test_an_engine_gets_what_was_fetched_under_a_name_of_its_own(place: Place) -> None:
    """Each content is fetched once, and its engine has it by a name with its hash; while it replaces another, both."""
    first, second = stored(FIRST), stored(SECOND, "2")
    assert place.want(first) == {OF_FIRST: "/cache/1111"}
    before = (PlannedAdapter(name="legal", revision="1", content_hash=FIRST),)
    assert planned(place.adapters, status(("ready", {OF_FIRST: "1"}))) == (before, ())
    both = {OF_FIRST: "/cache/1111", OF_SECOND: "/cache/2222"}
    assert place.want(second, plan=in_plan(*before)) == both
    assert planned(place.adapters, status(("ready", {OF_FIRST: "1"})), before)[0] == before
    after = (PlannedAdapter(name="legal", revision="2", content_hash=SECOND),)
    assert planned(place.adapters, status(("ready", {OF_FIRST: "1", OF_SECOND: "2"})), before) == (after, (OF_FIRST,))
    assert place.fetched == [FIRST, SECOND]


def test_a_content_stays_until_no_worker_uses_it(place: Place) -> None:
    """The old content stays as long as the plan has it or a worker has not adopted the next plan, and some seconds
    more; then the engine unloads it, and is told so until it surely knows."""
    old, new = in_plan(PlannedAdapter(name="legal", revision="1", content_hash=FIRST)), stored(SECOND, "2")
    now = in_plan(PlannedAdapter(name="legal", revision="2", content_hash=SECOND))
    place.want(stored(FIRST))
    place.now += 100
    assert OF_FIRST in place.want(new, plan=old)
    place.now += 100
    assert OF_FIRST in place.want(new, plan=now, is_adopted=False)
    place.now += KEEP_SECONDS - 0.1
    assert OF_FIRST in place.want(new, plan=now)
    assert place.told.wanted["key"].withdrawn == frozenset()
    place.now += 0.1
    assert OF_FIRST not in place.want(new, plan=now)
    assert place.told.wanted["key"].withdrawn == {OF_FIRST}
    place.now += FORGET_SECONDS
    place.want(new, plan=now)
    assert place.told.wanted["key"].withdrawn == frozenset()


def test_the_old_content_is_answered_with_for_a_bounded_time(place: Place) -> None:
    """A gateway that cannot get the new content has no adapter of the name after a minute, rather than the old one."""
    before = (PlannedAdapter(name="legal", revision="1", content_hash=FIRST),)
    place.want(stored(FIRST))
    place.problem = "the database is away"
    place.want(stored(SECOND, "2"), plan=in_plan(*before))
    have = status(("ready", {OF_FIRST: "1"}))
    place.now += OLD_SECONDS - 1
    assert planned(place.adapters, have, before)[0] == before
    (report,) = place.adapters.reports(in_plan(*before), "chat", [stored(SECOND, "2")], is_adopted=True).values()
    assert (report.state, report.message, report.content_hash) == ("LOADING", "the database is away", SECOND)
    place.now += 1
    assert planned(place.adapters, have, before)[0] == ()


def test_a_start_waits_for_what_can_be_had(place: Place) -> None:
    """An adapter that is being fetched or loaded is missing; one whose content cannot be fetched is not waited for."""
    place.want(stored(FIRST))
    assert place.adapters.are_missing(in_plan())
    assert not place.adapters.are_missing(in_plan(PlannedAdapter(name="legal", revision="1", content_hash=FIRST)))
    place.problem = "the database is away"
    place.want(stored(SECOND, "2"))
    assert not place.adapters.are_missing(in_plan())


def test_equal_contents_are_shared_and_unequal_ones_live_together(place: Place) -> None:
    """Endpoints that share an engine share a content, and may give different contents the same name."""
    both = [deployed("poet"), deployed("chat")]
    for _ in range(2):
        wanted = {"chat": (stored(FIRST),), "poet": (stored(SECOND, "9"),)}
        place.adapters.want(wanted, both, place.told, plan=Plan())  # type: ignore[arg-type]
    assert place.told.wanted["key"].adapters.keys() == {OF_FIRST, OF_SECOND}
    found = status(("ready", {OF_FIRST: "1", OF_SECOND: "9"}))
    assert [planned(place.adapters, found, name=name)[0][0].refusal for name in ("chat", "poet")] == ["", ""]


def test_engines_elsewhere_are_told_the_hash(place: Place) -> None:
    """An engine on another host is told hash and directory, and nothing is fetched here for it."""
    (entity,) = deployed().entities
    hosted = msgspec.structs.replace(entity.config, placement="hosts")
    endpoint = deployed()
    endpoint.entities = (msgspec.structs.replace(entity, config=hosted),)
    place.adapters.want({"chat": (stored(FIRST),)}, [endpoint], place.told, plan=Plan())  # type: ignore[arg-type]
    assert place.told.wanted["key"].adapters[OF_FIRST].path == f"sha256:{FIRST}:/a"
    assert place.fetched == []
