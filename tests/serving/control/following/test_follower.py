"""Endpoints that follow an alias: canaries, their promotion and roll-back, and who may end them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from mlflow_llm.serving.control.fleet import Fleet
from mlflow_llm.serving.control.following.alias_process import Target
from mlflow_llm.serving.control.following.follower import AliasFollower
from mlflow_llm.serving.control.hosts.placer import Placer
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource, Route
from mlflow_llm.serving.endpoints.engine_hosts import EngineHost, HostedEngine, Offer
from mlflow_llm.serving.endpoints.gateways import EndpointReport
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.canary import Canary, EntityCounts, base_name
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.store.tables import followed_aliases

CANARY = {"traffic_percentage": 10, "duration_s": 600, "min_requests": 10, "max_error_rate": 0.1}
POLL = 60.0
STEP = 30.0  # seconds by which the clock moves at most


class AtOnce(Executor):
    """An executor that runs what it is given before it returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **options))
        except Exception as error:
            done.set_exception(error)
        return done


class Place:
    """A registry, a store, a gateway that serves what the store says at once, and a follower under one clock."""

    def __init__(self, url: str) -> None:
        self.now = 1000.0
        self.means, self.metrics = "1", {"1": {}}  # type: dict[str, dict[str, float]]
        self.broken: dict[str, str] = {}
        self.lookups = self.located = 0
        self.all_hosted = True  # whether all entities that were located are on joined hosts
        self.counts: dict[str, EntityCounts] = {}
        self.store = Store(url)
        self.endpoints = EndpointStore(self.store, locate=self.locate, clock=lambda: self.now)
        self.fleet = Fleet(self.endpoints, name="a", monotonic=lambda: self.now)
        self.follower = self.new_follower()

    def new_follower(self) -> AliasFollower:
        return AliasFollower(
            self.endpoints,
            locate=self.locate,
            poll=POLL,
            lookup=self.lookup,
            monotonic=lambda: self.now,
            thread=AtOnce(),
        )

    def lookup(self, questions: Mapping[str, Iterable[str]]) -> dict[str, Target]:
        self.lookups += 1
        if "registry" in self.broken:
            raise PackagingError(self.broken["registry"])
        metrics = self.metrics.get(self.means, {})
        return {
            uri: Target(uri=f"models:/assistant/{self.means}", metrics={n: metrics[n] for n in names if n in metrics})
            for uri, names in questions.items()
        }

    def locate(self, entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
        self.located += 1
        self.all_hosted = self.all_hosted and all(one.is_hosted for one in entities)
        return tuple(self.source(self.means if one.entity_version == "@champion" else one.entity_version)
                     for one in entities)  # fmt: skip

    def source(self, version: str) -> ModelSource:
        if version in self.broken:
            raise PackagingError(self.broken[version])
        bundle = Bundle(content_hash=version * 8, tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
        return ModelSource(uri=f"models:/assistant/{version}", bundle=bundle)

    def create(self, **entity: Any) -> None:
        served = {"name": "main", "entity_name": "assistant", "entity_version": "@champion", "follow_alias": True}
        self.endpoints.create({"name": "chat", "config": {"served_entities": [served | entity]}})
        self.run()

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass; the gateway serves what it should, and reports ``counts``."""
        until = self.now + seconds
        while True:
            for _ in range(3):  # a config is served in the tick after it was made
                states = self.endpoints.states()
                reports = {}
                for state in states:
                    version = state.pending_version or state.active_version
                    assert version is not None
                    canary = self.endpoints.config(state.name, version).canary
                    counted = None if canary is None else self.counts.get(canary.name, EntityCounts(entity=canary.name))
                    reports[state.id] = EndpointReport(version=version, ready=True, canary=counted)
                self.fleet.tick(states, reports, serving=True)
                self.follower.tick(self.endpoints.states(), self.fleet.fence)
            if self.now >= until:
                return
            self.now += min(until - self.now, STEP)

    def answer(self, requests: int, errors: int = 0, **more: Any) -> None:
        """Have the running canary answer so many requests."""
        canary = self.config.canary
        assert canary is not None
        more = {name: {str(limit): count for limit, count in buckets.items()} for name, buckets in more.items()}
        self.counts[canary.name] = EntityCounts(entity=canary.name, requests=requests, errors=errors, **more)

    def move(self, version: str, **metrics: float) -> None:
        """Move the alias, and wait until the registry has been asked."""
        self.means, self.metrics[version] = version, metrics
        self.run(POLL)

    @property
    def config(self) -> EndpointConfig:
        (state,) = self.endpoints.states()
        assert state.active_version is not None
        return self.endpoints.config("chat", state.active_version)

    @property
    def serves(self) -> dict[str, int]:
        """The registry's versions that are served, with their shares."""
        config = self.config
        return {one.model.identity.version: config.share(one.name) for one in config.served_entities}

    def history(self) -> list[tuple[str, str]]:
        """Return the state and the message of each version of the config, the oldest first."""
        found = self.endpoints.history("chat")["versions"]
        return [(one["state"], one.get("message", "")) for one in reversed(found)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(f"sqlite:///{tmp_path / 'serving.db'}")
    yield made
    made.store.close()


@pytest.fixture
def anywhere(store_url: str) -> Iterator[Place]:
    """Yield a place in each kind of database."""
    made = Place(store_url)
    yield made
    made.store.close()


def test_without_a_canary_the_endpoint_moves_at_once(anywhere: Place) -> None:
    """An alias that moves takes its endpoint along, and the history says from where to where."""
    place = anywhere
    place.create()
    place.run(2 * POLL)
    assert (place.serves, len(place.history())) == ({"1": 100}, 1)
    place.move("2")
    assert place.serves == {"2": 100}
    assert place.history()[-1] == ("active", "models:/assistant@champion moved from assistant/1 to assistant/2")
    assert place.endpoints.history("chat")["versions"][0]["creator"] == "follow_alias"


def test_a_canary_that_keeps_its_bounds_is_promoted(place: Place) -> None:
    """A canary has its share for its time, and then everything; without enough requests it goes on."""
    place.create(canary=CANARY)
    place.move("2")
    assert place.serves == {"1": 90, "2": 10}
    place.answer(9)
    place.run(700)
    assert place.serves == {"1": 90, "2": 10}
    place.answer(10, errors=1)
    place.run(1)
    assert place.serves == {"2": 100}
    states = [state for state, _ in place.history()]
    assert states == ["superseded", "promoted", "active"]
    assert place.history()[-1][1].startswith(
        "the canary assistant/2 was promoted: no bound was broken by 10 requests in 7"
    )
    assert [one.name for one in place.config.served_entities] == ["main"]


def test_engines_on_joined_hosts_follow_on_joined_hosts(place: Place) -> None:
    """An alias of an entity on joined hosts is followed there: canary and successor are located without weights, get
    engines of their own on as many hosts, and the engines of before are no longer placed.
    """
    hosts = place.endpoints.hosts
    for name in ("a", "b"):
        offer = Offer(memory=2**30, cpus=1)
        hosts.join(EngineHost(host=name, name=name, started_ms=0, generation=0, beat=0, offer=offer))
    placer = Placer(place.endpoints, clock=lambda: place.now, monotonic=lambda: place.now)

    def placed() -> dict[str, set[str]]:
        """Return the hosts that are to run each version, two rounds of the placer later."""
        for joined in hosts.all().hosts:
            ready = {one.id: HostedEngine(state="READY", address="tcp://h:1") for one in hosts.all().placements}
            hosts.beat(msgspec.structs.replace(joined, beat=joined.beat + 1, engines=ready))
        place.now += 1
        placer.tick(place.endpoints.states(), place.fleet.fence)
        found: dict[str, set[str]] = {}
        for one in hosts.all().placements:
            found.setdefault(one.entity.model.identity.version, set()).add(one.host)
        return found

    place.create(placement="hosts", replicas=2, canary=CANARY)
    assert placed() == {"1": {"a", "b"}}
    place.move("2")
    assert place.serves == {"1": 90, "2": 10}
    assert {(one.placement, one.replicas) for one in place.config.served_entities} == {("hosts", 2)}
    assert placed() == {"1": {"a", "b"}, "2": {"a", "b"}}
    place.answer(10)
    place.run(700)
    assert place.serves == {"2": 100}
    assert placed() == {"2": {"a", "b"}}
    assert [(one.placement, one.replicas) for one in place.config.served_entities] == [("hosts", 2)]
    assert place.all_hosted


@pytest.mark.parametrize(
    ("bounds", "answers", "reason"),
    [
        ({}, {"requests": 10, "errors": 2}, "2 of 10 requests failed, an error rate of 0.2, above 0.1"),
        (
            {"max_ttft_p95_s": 0.5},
            {"requests": 20, "ttft": {0.5: 18, 1.0: 2}},
            "2 of 20 streamed requests had a time to first token above 0.5 s, more than 5 %",
        ),
        (
            {"max_tpot_p95_s": 0.05},
            {"requests": 20, "tpot": {0.05: 0, 0.1: 20, "+Inf": 0}},
            "20 of 20 streamed requests had a time per output token above 0.05 s, more than 5 %",
        ),
    ],
)
def test_a_canary_that_breaks_a_bound_is_rolled_back(
    place: Place, bounds: dict[str, float], answers: dict[str, Any], reason: str
) -> None:
    """Its version gets no traffic any more, is not tried again until the alias moves once more, and the history says
    which bound was broken."""
    place.create(canary=CANARY | bounds)
    place.move("2")
    place.answer(**answers)
    place.run(1)
    assert place.serves == {"1": 100}
    versions = place.endpoints.history("chat")["versions"]
    assert [one["state"] for one in versions] == ["active", "rolled_back", "superseded"]
    assert (versions[0]["restores"], versions[1]["message"]) == (1, reason)
    assert versions[0]["message"] == f"the canary assistant/2 was rolled back: {reason}"
    place.run(5 * POLL)
    assert (place.serves, len(place.history())) == ({"1": 100}, 3)
    place.move("1")
    place.move("2")
    assert place.serves == {"1": 90, "2": 10}


def test_too_few_requests_break_no_bound(place: Place) -> None:
    """Nine failures of nine requests say nothing where ten are asked for, and eight slow ones nothing about latency."""
    place.create(canary=CANARY | {"max_ttft_p95_s": 0.5})
    place.move("2")
    place.answer(9, errors=9)
    place.run(300)
    assert place.serves == {"1": 90, "2": 10}
    place.answer(50, errors=1, ttft={0.5: 0, 30.0: 8})
    place.run(600)
    assert place.serves == {"2": 100}
    assert place.history()[-1][1].endswith("; time to first token was not judged, by 8 streamed requests")


def test_a_score_below_its_bound_keeps_a_version_from_any_traffic(place: Place) -> None:
    """A version whose score is too low already is recorded as rolled back, and is never served."""
    place.create(canary=CANARY | {"min_scores": {"quality": 0.8}})
    place.move("2", quality=0.5)
    assert place.serves == {"1": 100}
    moved = "models:/assistant@champion moved from assistant/1 to assistant/2"
    assert place.history()[-1] == ("rolled_back", f"{moved}: quality is 0.5, below 0.8")
    place.run(3 * POLL)
    assert len(place.history()) == 2
    place.move("3", quality=0.9)
    assert place.serves == {"1": 90, "3": 10}


def test_a_score_may_come_while_the_canary_runs(place: Place) -> None:
    """An evaluation that ends too low rolls the canary back; one that is lacking at the end does so too."""
    place.create(canary=CANARY | {"min_scores": {"quality": 0.8}})
    place.move("2")
    assert place.serves == {"1": 90, "2": 10}
    place.metrics["2"]["quality"] = 0.7
    place.run(POLL + 1)
    assert place.serves == {"1": 100}
    assert place.history()[1] == ("rolled_back", "quality is 0.7, below 0.8")
    place.move("3")
    place.answer(10)
    place.run(700)
    assert place.history()[3] == ("rolled_back", "MLflow has no metric quality of the version")


def test_an_alias_that_moves_on_replaces_the_canary(place: Place) -> None:
    """The next version gets a canary of its own, beside the version that was served before; a way back ends it."""
    place.create(canary=CANARY)
    place.move("2")
    place.move("3")
    assert place.serves == {"1": 90, "3": 10}
    assert place.history()[1] == ("stopped", "models:/assistant@champion moved from assistant/2 to assistant/3")
    place.move("1")
    assert place.serves == {"1": 100}
    assert place.history()[2] == ("rolled_back", "models:/assistant@champion means assistant/1 again")


def test_an_operators_update_ends_the_canary(place: Place) -> None:
    """An operator's config is served, also if he sends it back as it was shown, with the canary in it."""
    place.create(canary=CANARY)
    place.move("2")
    shown = place.endpoints.get("chat")["config"]
    assert [one.get("canary_of") for one in shown["served_entities"]] == [None, "main"]
    sent = [
        {key: one[key] for key in ("name", "entity_name", "entity_version", "canary_of", "canary") if key in one}
        | {"follow_alias": one.get("follow_alias", False)}
        for one in shown["served_entities"]
    ]
    place.means = "1"  # what the operator's update finds
    place.endpoints.update_config("chat", {"served_entities": sent, "traffic_config": shown["traffic_config"]})
    place.means = "2"
    place.run()
    assert place.serves == {"1": 100}
    assert place.history()[1] == ("stopped", "version 3 took its place")
    assert place.endpoints.get("chat")["config_origin"] == "api"
    place.run(3 * POLL)
    assert (place.serves, len(place.history())) == ({"1": 100}, 3)
    place.endpoints.roll_back("chat", {})
    place.run(3 * POLL)
    assert len(place.history()) == 4  # the version before was no canary, and its alias has not moved since


def test_a_command_line_that_starts_moves_no_followed_alias(place: Place) -> None:
    """Neither a canary nor a roll-back is undone by a start, which declares the version of the alias by then; what else
    a command line changes is served, with the version that was."""

    def declared(version: str, **more: Any) -> EndpointConfig:
        entity = EntityConfig(
            name="assistant-champion",
            asked="models:/assistant@champion",
            entity_name="assistant",
            entity_version="champion",
            follow_alias=True,
            canary=Canary(**CANARY),
            source=place.source(version),
        )
        route = Route(served_model_name=entity.name, traffic_percentage=100)
        return EndpointConfig(served_entities=(entity,), routes=(route,), **more)

    place.endpoints.declare("chat", declared("1"))
    place.run()
    place.move("2")
    assert place.endpoints.declare("chat", declared("2")) == 2
    assert place.serves == {"1": 90, "2": 10}
    place.answer(10, errors=10)
    place.run(1)
    assert place.endpoints.declare("chat", declared("2")) == 3
    assert place.serves == {"1": 100}
    assert place.endpoints.declare("chat", declared("2", sticky=True)) == 4
    place.run()
    assert (place.serves, place.config.sticky) == ({"1": 100}, True)
    assert place.endpoints.get("chat")["config_origin"] == "command_line"


def test_what_a_release_before_has_rolled_back_is_not_tried_again(place: Place) -> None:
    """It remembered the version by what the command line asked for, which was the name of the entity."""
    given = {"name": "models:/assistant@champion", "entity_name": "assistant", "entity_version": "champion"}
    entity = EntityConfig(**given, follow_alias=True, canary=Canary(**CANARY), source=place.source("1"))
    routes = (Route(served_model_name=entity.name, traffic_percentage=100),)
    place.endpoints.declare("chat", EndpointConfig(served_entities=(entity,), routes=routes))
    place.run()
    place.move("2")
    place.answer(10, errors=10)
    place.run(1)
    assert (place.serves, place.config.served_entities[0].name) == ({"1": 100}, "assistant-champion")
    named = sa.update(followed_aliases).values(entity=entity.name)
    assert place.store.write(lambda connection: connection.execute(named).rowcount) == 1
    place.run(3 * POLL)
    assert (place.serves, len(place.history())) == ({"1": 100}, 3)


def test_a_new_leader_goes_on_with_a_canary(place: Place) -> None:
    """Time and share of a canary outlive the process that began it, and scores are looked up before it is promoted."""
    place.create(canary=CANARY | {"min_scores": {"quality": 0.8}})
    place.move("2", quality=0.9)
    place.answer(10)
    place.run(500)
    place.follower = place.new_follower()
    place.broken["registry"] = "it is away"
    place.run(300)
    assert place.serves == {"1": 90, "2": 10}
    del place.broken["registry"]
    place.run(POLL + 1)
    assert place.serves == {"2": 100}


def test_a_version_that_cannot_be_served_is_said_and_tried_again(place: Place) -> None:
    """The endpoint stays on its version and says why; pauses between attempts grow."""
    place.create(canary=CANARY)
    place.broken["2"] = "its weights are missing"
    place.move("2")
    state = place.endpoints.get("chat")["state"]
    assert (place.serves, state["config_update"]) == ({"1": 100}, "UPDATE_FAILED")
    assert state["message"] == (
        "models:/assistant@champion means assistant/2 now, which cannot be served: its weights are missing"
    )
    before = place.located
    place.run(10 * POLL)
    assert 2 <= place.located - before <= 4
    place.broken.clear()
    place.run(20 * POLL)
    assert place.serves == {"1": 90, "2": 10}


def test_a_gateway_that_does_not_lead_follows_nothing(place: Place) -> None:
    """Only the leader asks the registry."""
    place.create()
    before = place.lookups
    for _ in range(5):
        place.now += POLL
        place.follower.tick(place.endpoints.states(), None)
    assert place.lookups == before


def test_the_counts_of_all_gateways_are_judged(place: Place) -> None:
    """Six requests here and four there are ten."""
    place.create(canary=CANARY)
    place.move("2")
    place.answer(6, errors=1)
    canary = place.config.canary
    assert canary is not None
    other = Fleet(place.endpoints, name="b", monotonic=lambda: place.now)
    (state,) = place.endpoints.states()
    counted = EntityCounts(entity=canary.name, requests=4, errors=1)
    report = EndpointReport(version=state.active_version, ready=True, canary=counted)
    other.tick((state,), {state.id: report}, serving=True)
    place.run(1)
    assert place.history()[1][1] == "2 of 10 requests failed, an error rate of 0.2, above 0.1"


@pytest.mark.parametrize(
    ("entity", "field"),
    [
        ({"entity_version": "1"}, "follow_alias"),
        ({"follow_alias": False, "canary": {}}, "canary"),
        ({"canary": {"traffic_percentage": 100}}, "canary.traffic_percentage"),
        ({"canary": {"duration": 5}}, "canary.duration"),
        ({"canary": {"min_scores": {"quality": "high"}}}, "canary.min_scores"),
        ({"canary": {}, "max_provisioned_throughput": 1000}, "canary"),
        ({"follow_alias": "yes"}, "follow_alias"),
    ],
)
def test_settings_that_make_no_sense_are_refused(place: Place, entity: dict[str, Any], field: str) -> None:
    """Each with the path of its field."""
    with pytest.raises(InvalidField) as refused:
        place.create(**entity)
    assert refused.value.param == f"config.served_entities[0].{field}"


def test_a_canary_is_priced_as_its_original() -> None:
    """Its name leads to the entity that it is of; no other name does."""
    assert base_name("models:/assistant@champion~12-3fa0") == "models:/assistant@champion"
    assert base_name("main~12") is None
    assert base_name("main-12") is None
