"""How a request finds a served entity, and a replica of it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import gevent
import msgspec
import pytest

from mlflow_llm.serving.endpoints.config import Route
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import AdapterInfo, EngineRecord, Health, TappableStream
from mlflow_llm.serving.interface.errors import DeadlineExceeded, InvalidField, NotFound, Unavailable
from mlflow_llm.serving.interface.events import Event, Failed, Finished, Tokens
from mlflow_llm.serving.interface.request import LoraTask, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering.accounts.authorization import Caller
from mlflow_llm.serving.model_files.model_version import ModelVersion
from mlflow_llm.serving.routing.load_shedding import LoadShedder
from mlflow_llm.serving.routing.model_aliases import ModelAliases
from mlflow_llm.serving.routing.replica_set import ReplicaSet
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoint, ServedEndpoints, ServedEntity
from mlflow_llm.serving.routing.traffic import TrafficSplit
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport.client.event_stream import EventBuffer, RemoteStream
from mlflow_llm.serving.transport.client.gevent_client import LocalQueue

NUMBERS = itertools.count()
ROUTES = (Route(served_model_name="a", traffic_percentage=25), Route(served_model_name="b", traffic_percentage=75))


@pytest.fixture
def engine(instant_bundle: Bundle) -> InstantEngine:
    return InstantEngine(instant_bundle, EngineSettings(max_model_len=256))


@pytest.fixture
def endpoints(engine: InstantEngine, instant_text: TextModel) -> ServedEndpoints:
    """Return endpoints: ``chat`` is split over the entities a (25 %) and b; ``loyal`` is the same, and sticky."""

    def entity(name: str, entity: str) -> ServedEntity:
        view = EndpointView(name=name, info=engine.info, text=instant_text, adapters=("pirate",), names=(entity,))
        return ServedEntity(endpoint=name, entity=entity, view=view, engine=engine)

    def routed(name: str, sticky: bool) -> ServedEndpoint:
        split = TrafficSplit(name, ROUTES, start=7)
        return ServedEndpoint(name=name, entities={e: entity(name, e) for e in "ab"}, split=split, sticky=sticky)

    found = ServedEndpoints()
    found.replace((routed("chat", False), routed("loyal", True)))
    return found


def test_an_endpoint_is_split_and_an_entity_is_itself(endpoints: ServedEndpoints) -> None:
    """An endpoint's name splits traffic by share, with an adapter too; an entity's name selects that entity alone."""
    shares = Counter(endpoints.route("chat")[0].entity for _ in range(400))
    assert abs(shares["a"] - 100) <= 4
    assert {endpoints.route("chat:pirate")[0].entity for _ in range(20)} == {"a", "b"}
    assert {endpoints.route("chat", "a")[0].entity for _ in range(20)} == {"a"}
    assert endpoints.route("loyal", "b")[0].endpoint == "loyal"
    with pytest.raises(InvalidField, match="chat and loyal have a served entity of this name"):
        endpoints.route("a")
    for unknown in ("c", "chat:c", "c:pirate", None):
        with pytest.raises(NotFound):
            endpoints.route(unknown)


def test_an_adapter_is_found_by_its_own_name(endpoints: ServedEndpoints) -> None:
    """An adapter's own name finds it if one visible endpoint has it; if several do the caller is told to choose."""
    with pytest.raises(InvalidField, match="chat:pirate and loyal:pirate"):
        endpoints.route("pirate")
    alone = ServedEndpoints(endpoints.route("chat", "a")[0])
    entity, adapter = alone.route("pirate")
    assert (entity.endpoint, adapter) == ("chat", "pirate")
    only = Caller(key_id="k", tenant="t", scopes=("invoke",), endpoints=("chat:other",))
    with pytest.raises(NotFound):
        alone.seen_by(only).route("pirate")


def test_finding_an_endpoint_takes_no_part_in_its_traffic(endpoints: ServedEndpoints) -> None:
    """Finding an endpoint, entity or adapter does not advance the traffic split."""
    expected = TrafficSplit("chat", ROUTES, start=7)
    for _ in range(40):
        assert endpoints.find("chat")[0].entity == "a"
        assert endpoints.find("chat:pirate") == (endpoints.find("chat")[0], "pirate")
        with pytest.raises(NotFound):
            endpoints.find("chat:c")
        assert endpoints.route("chat", "chat:pirate")[0].entity == expected.choose()


def test_a_bodys_model_must_belong_to_the_paths_endpoint(endpoints: ServedEndpoints) -> None:
    """A body may name an entity or an adapter of the path's endpoint; others, and unknown ones, are refused."""
    entity, adapter = endpoints.route("chat:pirate", "b")
    assert (entity.endpoint, entity.entity, adapter) == ("chat", "b", "pirate")
    assert endpoints.route("chat", "chat:pirate")[1] == "pirate"
    for other in ("loyal", "loyal:pirate"):
        with pytest.raises(InvalidField, match="as in the path"):
            endpoints.route("chat:pirate", other)
    with pytest.raises(NotFound, match="endpoint chat has no adapter 'other'"):
        endpoints.route("chat:pirate", "chat:other")
    with pytest.raises(NotFound, match="endpoint chat has no adapter 'other'"):
        endpoints.route("chat", "chat:other")


def test_callers_stick_where_it_is_asked(endpoints: ServedEndpoints) -> None:
    """Requests stick by their own key on any endpoint, and by API key on a sticky one unless it is anonymous."""

    def chosen(name: str, **who: str) -> set[str]:
        return {endpoints.route(name, **who)[0].entity for _ in range(20)}

    keys = [f"key_{number}" for number in range(40)]
    assert all(len(chosen("chat", sticky_key=key)) == 1 for key in keys)
    assert all(len(chosen("loyal", caller=key)) == 1 for key in keys)
    assert {entity for key in keys for entity in chosen("loyal", caller=key)} == {"a", "b"}
    assert chosen("chat", caller="key_1") == chosen("loyal", caller="anonymous") == {"a", "b"}


def request(deadline: float | None = None) -> ValidRequest:
    return ValidRequest(
        request_id=f"r-{next(NUMBERS)}",
        task="completions",
        model="m",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=3, temperature=0.0),
        deadline=deadline,
    )


@pytest.fixture
def replicated(instant_bundle: Bundle, engine: InstantEngine) -> Callable[[], ReplicaSet]:
    """Return a maker of replicas of instant engines at any address but "gone"; ``wanted`` counts requests for one."""

    def build() -> ReplicaSet:
        wanted: list[int] = []

        def open(address: str) -> InstantEngine:
            if address == "gone":
                raise Unavailable("the engine is not running")
            return InstantEngine(instant_bundle, EngineSettings(max_model_len=256))

        adapters = (AdapterInfo(name="pirate", rank=0, path=""),)
        found = ReplicaSet(engine.info, adapters, open=open, request_replica=lambda: wanted.append(1))
        found.wanted = wanted  # type: ignore[attr-defined]
        return found

    return build


def test_the_replica_with_the_least_to_do_is_taken(replicated) -> None:
    """Requests that run are spread evenly; one that has ended makes room."""
    replicas = replicated()
    assert replicas.set_addresses(("x", "y"))
    assert replicas.num_replicas == 2
    streams = [replicas.submit(request()) for _ in range(6)]
    assert [len(replica.streams) for replica in replicas.active.values()] == [3, 3]
    assert all(isinstance(list(stream)[-1], Finished) for stream in streams)
    assert replicas.health().status == "ready"
    replicas.close()


def test_the_requests_of_a_task_go_to_one_replica(replicated) -> None:
    """Requests of one adapter task go to one replica, in any worker, and different tasks are spread."""
    workers = [replicated() for _ in range(2)]
    for replicas, addresses in zip(workers, (("x", "y"), ("y", "x")), strict=True):
        replicas.set_addresses(addresses)
    chosen: dict[int, set[str]] = {}
    for replicas in workers:
        for task_id in [*range(16)] * 2:
            asked = msgspec.structs.replace(request(), lora_task=LoraTask(task_id=task_id), tenant="acme")
            found = replicas.of_task(asked)
            chosen.setdefault(task_id, set()).update(a for a, one in replicas.active.items() if one is found)
            list(replicas.submit(asked))
    assert all(len(addresses) == 1 for addresses in chosen.values())
    assert set.union(*chosen.values()) == {"x", "y"}
    for replicas in workers:
        replicas.close()


def test_a_former_replica_is_held_until_its_requests_have_ended(replicated) -> None:
    """A former replica gets no new requests, and its address is reported until it is released."""
    replicas = replicated()
    replicas.set_addresses(("x", "y"))
    streams = [replicas.submit(request()) for _ in range(2)]
    replicas.set_addresses(("x",))
    assert replicas.addresses == {"x", "y"}
    assert not replicas.is_settled
    assert not replicas.release_idle()
    assert len({id(stream) for stream in [*streams, replicas.submit(request())]}) == 3
    for stream in streams:
        assert isinstance(list(stream)[-1], Finished)
    del stream
    streams.clear()
    assert replicas.release_idle()
    assert replicas.is_settled
    assert replicas.addresses == {"x"}
    replicas.close()


@pytest.mark.parametrize(
    ("events", "closes"),
    [
        ([Tokens(0, (1,)), Finished(0, "stop")], False),
        ([Failed("unavailable", "the engine died")], False),
        ([Tokens(0, (1,))], True),
        ([], True),
    ],
    ids=["ended", "failed", "closed early", "never read"],
)
def test_a_former_replica_is_released_when_its_streams_are_over(
    engine: InstantEngine, events: list[Event], closes: bool
) -> None:
    """A former replica is released when its streams are over, even if a traceback still refers to one."""
    buffer = EventBuffer(LocalQueue(), 1)
    handle = SimpleNamespace(post=lambda command: None, abort=lambda: None)
    one = SimpleNamespace(
        submit=lambda request: RemoteStream(handle, buffer, 1),  # type: ignore[arg-type]
        process_health=dict,
        close=lambda: None,
    )
    replicas = ReplicaSet(engine.info, (), open=lambda address: one, request_replica=lambda: None)
    replicas.set_addresses(("x",))
    stream = replicas.submit(request())
    replicas.set_addresses(())
    for event in events:
        assert not replicas.release_idle()
        buffer.put(event)
        assert next(stream) == event
    if closes:
        assert not replicas.release_idle()
        stream.close()
    assert replicas.release_idle()
    assert replicas.addresses == set()


def test_without_a_replica_a_request_waits_and_asks_for_one(replicated) -> None:
    """Without a replica a request asks for one and waits until its deadline; the model's adapters are known."""
    replicas = replicated()
    assert [adapter.name for adapter in replicas.adapters()] == ["pirate"]
    assert replicas.health().status == "ready"
    waiting = gevent.spawn(lambda: list(replicas.submit(request())))
    (failed,) = replicas.submit(request(time.monotonic() + 0.05))
    assert (type(failed), failed.kind) == (Failed, "deadline_exceeded")
    assert replicas.wanted
    assert not replicas.set_addresses(("gone",))
    assert not waiting.ready()
    assert replicas.set_addresses(("x",))
    assert isinstance(waiting.get(timeout=240)[-1], Finished)
    replicas.close()


def test_requests_wait_their_time_for_replicas_that_should_be_there(replicated) -> None:
    """If no expected engine can be reached the state is starting, and requests wait only for their limit."""
    replicas = replicated()
    replicas.away_timeout = 0.05
    assert not replicas.set_addresses(("gone",))
    assert replicas.health().status == "starting"
    (failed,) = replicas.submit(request())
    assert (failed.kind, failed.message, failed.retry_after) == ("unavailable", "the engine is not running", 5.0)
    assert replicas.set_addresses(("x",))
    assert replicas.health().status == "ready"
    assert isinstance(list(replicas.submit(request()))[-1], Finished)
    replicas.close()


def test_streams_of_a_replica_that_is_away_request_another(engine: InstantEngine) -> None:
    """Streams of a lost replica request another about once a second, but not while another replica takes them over."""
    states, wanted = {"x": "starting", "y": "starting"}, []

    def open(address: str) -> SimpleNamespace:
        return SimpleNamespace(
            health=lambda: Health(status=states[address]),
            submit=engine.submit,
            hand_over=lambda stream, other: True,
            close=lambda: None,
        )

    replicas = ReplicaSet(engine.info, (), open=open, request_replica=lambda: wanted.append(1))
    replicas.set_addresses(("x", "y"))
    replicas.rescue()
    assert not wanted
    assert replicas.is_settled  # nothing runs
    stream = replicas.submit(request())
    replicas.rescue()
    replicas.rescue()
    assert len(wanted) == 1
    replicas.requested_at -= 2.0
    replicas.rescue()
    assert len(wanted) == 2
    states["y"] = "ready"
    replicas.requested_at -= 2.0
    replicas.rescue()
    assert len(wanted) == 2
    assert replicas.is_settled == (not len(replicas.active["x"].streams))
    stream.close()


def test_a_request_counts_for_its_engine(engine: InstantEngine) -> None:
    """A request counts for its engine from its entry until it leaves."""
    shedder = LoadShedder(max_queued=1, retry_after=1.0)
    shedder.enter("chat", engine)
    shedder.enter("chat", engine)
    assert shedder.running(engine) == 2
    shedder.leave(engine)
    shedder.leave(engine)
    assert shedder.running(engine) == 0


def test_a_request_that_cannot_be_in_time_is_told_when_to_come_back(engine: InstantEngine) -> None:
    """A request whose deadline is before the expected end of an engine's start is refused at once, with the remaining
    time in Retry-After, while the start is requested all the same.
    """
    asked: list[float] = []
    record = EngineRecord(start_seconds=100.0, unloaded="no request came for it")
    replicas = ReplicaSet(
        engine.info, (), open=lambda address: engine, request_replica=lambda: asked.append(1.0), record=lambda: record
    )
    failed = replicas.await_replica(time.monotonic() + 50.0)
    assert failed is not None
    assert failed.kind == Unavailable.kind
    assert "not loaded" in failed.message
    assert 50.0 < failed.retry_after <= 100.0
    assert asked == [1.0]
    late = replicas.await_replica(time.monotonic() - 1.0)
    assert late is not None
    assert late.kind == DeadlineExceeded.kind
    assert 50.0 < late.retry_after <= 100.0


@pytest.mark.parametrize("is_early", [True, False])
def test_the_stream_of_a_waiting_request_can_be_tapped(engine: InstantEngine, is_early: bool) -> None:
    """A tap takes the events of a request that waited for a replica, whether set before or after the replica came."""
    buffer = EventBuffer(LocalQueue(), 1)
    handle = SimpleNamespace(post=lambda command: None, abort=lambda: None)
    one = SimpleNamespace(
        health=lambda: Health(status="ready"),
        submit=lambda request: RemoteStream(handle, buffer, 1),  # type: ignore[arg-type]
        close=lambda: None,
    )
    replicas = ReplicaSet(engine.info, (), open=lambda address: one, request_replica=lambda: None)
    stream, taken, read = replicas.submit(request()), [], []

    def take(event: Event) -> bool:
        taken.append(event)
        return True

    assert isinstance(stream, TappableStream)
    if is_early:
        assert stream.tap(take)
    replicas.set_addresses(("x",))
    reader = gevent.spawn(lambda: [read.append(event) for event in stream])
    gevent.idle()
    if not is_early:
        buffer.put(Tokens(0, (1,)))
        gevent.idle()
        assert stream.tap(take)
        buffer.put(Tokens(0, (2,)))  # for this one its reader was waiting already
        gevent.idle()
    before = len(read)
    buffer.put(Tokens(0, (3,)))
    gevent.idle()
    assert taken == [Tokens(0, (3,))]
    assert len(read) == before
    stream.have_reader(lambda: read.append("called"))
    gevent.idle()
    assert read[before:] == ["called"]
    reader.kill()
    assert not stream.is_over
    stream.close()
    assert stream.is_over


@pytest.mark.parametrize(
    ("called", "found"),
    [
        ("gpt-4o", ("chat", None)),
        ("gpt-4o:pirate", ("chat", "pirate")),
        ("gpt-4o-mini", ("loyal", "pirate")),
        ("claude-3", ("loyal", None)),
        ("loyal", ("loyal", None)),
        (None, ("loyal", None)),
    ],
)
def test_aliases_of_models(endpoints: ServedEndpoints, called: str | None, found: tuple[str, str | None]) -> None:
    """An alias, a pattern and an alias with an adapter mean an endpoint; an endpoint's own name comes before an alias,
    and the default endpoint is that of a request that names none."""
    names = {"gpt-4o": "chat", "gpt-4o*": "loyal:pirate", "claude-?": "loyal", "loyal": "chat"}
    endpoints.aliases = ModelAliases(names=names, default="loyal")
    entity, adapter = endpoints.find(called) if called is not None else endpoints.route(None)
    assert (entity.endpoint, adapter) == found


def test_an_alias_gives_no_right(endpoints: ServedEndpoints) -> None:
    """A key that may not see the endpoint behind an alias gets what an unknown name gets; a default endpoint that it
    may not see is none for it."""
    endpoints.aliases = ModelAliases(names={"gpt-4o": "chat"}, default="chat")
    seen = endpoints.seen_by(Caller(key_id="k", tenant="t", scopes=("invoke",), endpoints=("loyal",)))
    with pytest.raises(NotFound, match=r"^no endpoint is called 'gpt-4o'; there is loyal$"):
        seen.find("gpt-4o")
    assert seen.route(None)[0].endpoint == "loyal"
    with pytest.raises(NotFound):
        endpoints.find("gpt-4")


def test_an_alias_of_nothing_is_an_unknown_name(endpoints: ServedEndpoints) -> None:
    """An alias whose endpoint is not served, or that has an adapter of its own and another behind it, is unknown."""
    endpoints.aliases = ModelAliases(names={"a1": "nowhere", "a2": "chat:pirate"})
    for called in ("a1", "a1:pirate", "a2:pirate"):
        with pytest.raises(NotFound, match="no endpoint is called"):
            endpoints.find(called)


def declared_by_uri(
    endpoints: ServedEndpoints, name: str, entity: str, uri: str, adapters: tuple[str, ...]
) -> ServedEndpoint:
    """Return an endpoint that a command line declares with ``uri``, of which the entity's name is made."""
    like = endpoints.route("chat", "a")[0]
    view = dataclasses.replace(like.view, name=name, adapters=adapters, names=(entity,))
    served = dataclasses.replace(
        like, endpoint=name, entity=entity, view=view, identity=ModelVersion(asked=uri), is_label=True
    )
    return ServedEndpoint(name=name, entities={entity: served})


def test_a_declared_entity_is_found_by_its_name_and_by_what_was_asked_for(endpoints: ServedEndpoints) -> None:
    """A client that names the model's URI goes on; a name that was made gives way to an adapter and an endpoint."""
    found = ServedEndpoints()
    found.replace(
        (
            declared_by_uri(endpoints, "talk", "assistant-champion", "models:/assistant@champion", ("pirate",)),
            declared_by_uri(endpoints, "small", "pirate", "/srv/models/pirate", ("other",)),
            declared_by_uri(endpoints, "large", "talk", "/srv/models/talk", ("talk",)),
        )
    )
    for name in ("assistant-champion", "models:/assistant@champion"):
        assert found.route(name)[0].entity == "assistant-champion"
        assert found.route("talk", name)[0].entity == "assistant-champion"
        assert found.route(f"{name}:pirate") == (found.route("talk")[0], "pirate")
    assert found.route("pirate") == (found.route("talk")[0], "pirate")
    assert found.route("small", "pirate") == (found.route("small")[0], None)
    assert found.route("/srv/models/pirate")[0].endpoint == "small"
    assert found.route("talk")[0].endpoint == "talk"
    assert found.route("large", "large:talk") == (found.route("large")[0], "talk")
    with pytest.raises(NotFound):
        found.route("")


def test_a_name_made_of_a_path_is_shown_to_who_manages(endpoints: ServedEndpoints) -> None:
    """Others see the endpoint's name, as they do instead of the path; a name that somebody gave is for all."""
    made = declared_by_uri(endpoints, "talk", "secret", "/srv/models/secret", ()).first
    user = Caller(key_id="k", tenant="t", scopes=("invoke",))
    manager = Caller(key_id="k", tenant="t", scopes=("manage",))
    assert [made.entity_shown_to(caller) for caller in (user, manager)] == ["talk", "secret"]
    assert dataclasses.replace(made, is_label=False).entity_shown_to(user) == "secret"
