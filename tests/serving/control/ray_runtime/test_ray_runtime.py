"""The leader's part of hosts that Ray starts: what it orders, what it shows, and what it leaves to its successor."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from instant_model import write_instant_model
from server_calls import until

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.control.hosts.hosted_engines import NO_HOST_SECONDS, ORDERED_SECONDS, HostedEngines
from mlflow_llm.serving.control.hosts.placer import LOOK_SECONDS, Placer
from mlflow_llm.serving.control.model_sources import locate
from mlflow_llm.serving.control.ray_runtime import runtime
from mlflow_llm.serving.control.ray_runtime.actor import HostActor
from mlflow_llm.serving.control.ray_runtime.cluster import ClusterError
from mlflow_llm.serving.control.ray_runtime.messages import HostReport, Launch, Order, Report, host_name
from mlflow_llm.serving.control.ray_runtime.process import AGAIN_SECONDS, obey_all
from mlflow_llm.serving.control.ray_runtime.runtime import PAUSE_SECONDS, RayRuntime
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.engine_hosts import EngineHost, HostedEngine, Offer, Start, placement_key
from mlflow_llm.serving.endpoints.gateways import Gateway
from mlflow_llm.serving.endpoints.scale import Scale
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.transport.auth import write_key

SCALE = {"runtime": "ray", "resources": {"GPU": 1}}
ENTITY = {"name": "one", "entity_name": "assistant", "entity_version": "1", "scale": SCALE}
LAUNCH = Launch(address=None, namespace="n", database="sqlite://", key="k")
NODE = {"GPU": 1.0, "CPU": 4.0}


class Ray:
    """A double of the Ray process: it does at once what it is told, and its nodes are as the test says."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostReport] = {}
        self.report, self.refusal = Report(), ""
        self.orders: list[Order] = []
        self.opened = self.closed = 0
        self._answer: Report | None = None

    def connect(self, launch: Launch) -> Ray:
        self.opened += 1
        return self

    @property
    def is_free(self) -> bool:
        return self._answer is None

    def receive(self) -> Report | None:
        found, self._answer = self._answer, None
        return found

    def send(self, order: Order) -> None:
        self.orders.append(order)
        failed = {one.name: self.refusal for one in order.start} if self.refusal else {}
        if not self.report.error:
            self.hosts |= {one.name: HostReport(name=one.name) for one in order.start if one.name not in failed}
            for name in order.drain:
                self.hosts[name] = msgspec.structs.replace(self.hosts[name], draining=True)
            for name in order.kill:
                del self.hosts[name]
        self._answer = msgspec.structs.replace(self.report, hosts=tuple(self.hosts.values()), failed=failed)

    def close(self) -> None:
        self.closed += 1


class Leader:
    """A leader whose clock moves when told to, over a store of its own."""

    def __init__(self, store: Store, ray: Ray, locate: Callable[..., Any], name: str) -> None:
        self.now, self.ray = 1000.0, ray
        self.endpoints = EndpointStore(store, locate=locate)
        gateway = Gateway(gateway=name, name=name, started_ms=0, serving=True, beat=1)
        take = self.endpoints.gateways.lease()
        self.fence = self.endpoints.gateways.write(gateway, fence=None, take=take)
        clock = lambda: self.now  # noqa: E731
        self.runtime = RayRuntime(self.endpoints, lambda: LAUNCH, connect=ray.connect, clock=clock, monotonic=clock)
        self.placer = Placer(self.endpoints, monotonic=clock)
        self.hosted = HostedEngines(self.endpoints.hosts, monotonic=clock)

    def tick(self, seconds: float = 1.0, times: int = 2) -> None:
        for _ in range(times):
            self.now += max(seconds, LOOK_SECONDS)
            self.runtime.tick(self.endpoints.states(), self.fence, lambda key: None)
            if self.fence is not None:
                self.placer.tick(self.endpoints.states(), self.fence)

    @property
    def engine(self) -> str:
        return placement_key(self.endpoints.config("chat", 1).served_entities[0])

    def problem(self) -> str:
        return self.hosted.problem(self.engine, self.endpoints.config("chat", 1).served_entities[0])

    def shown(self) -> list[tuple[str, str]]:
        return [(one["state"], one.get("message", "")) for one in self.endpoints.get("chat")["hosts"]]

    def join(self, name: str, *, draining: bool = False) -> EngineHost:
        """Let a host of Ray's join, and answer its actor."""
        offer = Offer(memory=1, cpus=1, start=Start(engine=self.engine))
        own = EngineHost(host=name, name=name, started_ms=0, generation=0, beat=1, offer=offer, draining=draining)
        self.ray.hosts[name] = HostReport(name=name, answers=True)
        return self.endpoints.hosts.join(own)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Callable[[], Leader]]:
    """Return ``leader()``: each is another gateway that leads over the same database and the same Ray."""
    bundle = msgspec.structs.replace(write_instant_model(tmp_path / "bundle"), adapters={})
    store, ray = Store(f"sqlite:///{tmp_path}/serving.db"), Ray()

    def find(entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
        return tuple(ModelSource(uri=one.uri, bundle=bundle) for one in entities)

    names = iter(("first", "second"))
    yield lambda: Leader(store, ray, find, next(names))
    store.close()


def create(one: Leader, **scale: object) -> None:
    one.ray.report = Report(nodes=(NODE,))
    one.endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY | {"scale": SCALE | scale}]}})


def test_ordered_hosts_are_shown_until_they_join_and_get_the_engine(leader: Callable[[], Leader]) -> None:
    """A host that Ray was told to start is shown with what it waits for; when it joins it gets the engine of its
    entity, which no other host does.
    """
    one = leader()
    create(one)
    one.tick(times=1)
    assert one.shown() == [("LOADING", "the leader connects to Ray")]
    one.endpoints.hosts.join(
        EngineHost(host="own", name="own", started_ms=0, generation=0, beat=0, offer=Offer(memory=9, cpus=9))
    )
    one.tick(times=3)
    assert one.shown() == [("LOADING", "Ray starts it, or waits for GPU: 1 to be free on a node")]
    assert [order.name for order in one.ray.orders[1].start] == list(one.ray.hosts)
    (name,) = one.ray.hosts
    one.join(name)
    one.tick()
    (placed,) = one.endpoints.hosts.all().placements
    assert placed.host == name
    assert [(host.name, host.generation) for host in one.endpoints.hosts.all().hosts] == [("own", 1), (name, 1)]
    assert len(one.ray.hosts) == 1


def test_a_new_leader_adopts_the_hosts_of_the_last_one(leader: Callable[[], Leader]) -> None:
    """After a fail-over no host is started twice; a leader that has lost the lease orders nothing more."""
    first = leader()
    create(first, min=2)
    first.tick(times=3)
    assert len(first.ray.hosts) == 2
    for name in list(first.ray.hosts):
        first.join(name)
    first.fence = None
    before = len(first.ray.orders)
    first.tick()
    assert (first.ray.closed, len(first.ray.orders)) == (1, before)
    second = leader()
    second.tick(times=4)
    assert second.ray.opened == 2
    assert len(second.ray.hosts) == 2
    assert not any(order.start or order.drain or order.kill for order in second.ray.orders[before:])


def test_a_host_that_cannot_be_started_says_why_and_is_tried_again(leader: Callable[[], Leader]) -> None:
    """The reason of a failed start fails the update that waits for it, and the start is repeated after a pause."""
    one = leader()
    create(one)
    name = host_name(one.engine, 0)
    one.ray.refusal = "No module named 'mlflow_llm'"
    one.tick(times=4)
    assert one.shown() == [("FAILED", "No module named 'mlflow_llm'")]
    one.hosted.look([one.engine])
    one.now += NO_HOST_SECONDS
    assert one.problem() == "No module named 'mlflow_llm'"
    orders = [order for order in one.ray.orders if order.start]
    assert len(orders) == 1
    one.ray.refusal = ""
    one.tick(PAUSE_SECONDS, times=2)
    assert list(one.ray.hosts) == [name]


def test_waiting_for_a_node_is_no_failure_for_a_long_time(leader: Callable[[], Leader]) -> None:
    """A cluster may take minutes to add a node: an update waits for it longer than for a host that just joins."""
    one = leader()
    create(one, resources={"GPU": 8})
    one.tick(times=3)
    one.hosted.look([one.engine])
    one.now += NO_HOST_SECONDS + 1
    assert one.problem() == ""
    one.now += ORDERED_SECONDS
    assert one.problem() == "Ray has no node with GPU: 8; it waits for one"


def test_an_unreachable_cluster_is_the_reason_that_is_shown(leader: Callable[[], Leader]) -> None:
    """If the leader cannot reach Ray, the endpoint's hosts say so, and nothing is started."""
    one = leader()
    create(one)
    one.ray.report = Report(error="no connection to Ray at ray:6379")
    one.tick(times=3)
    assert one.shown() == [("FAILED", "no connection to Ray at ray:6379")]
    assert not one.ray.hosts


def test_hosts_of_a_deleted_endpoint_end_and_ray_is_let_go(leader: Callable[[], Leader]) -> None:
    """When nothing wants an engine and nothing is placed on its hosts, they drain; the leader closes its way to Ray
    when none is left.
    """
    one = leader()
    create(one)
    one.tick(times=3)
    (name,) = one.ray.hosts
    host = one.join(name)
    one.tick()
    one.endpoints.delete("chat")
    one.tick(times=4)
    assert one.ray.hosts[name].draining
    one.endpoints.hosts.leave(host)
    one.ray.hosts.clear()
    one.tick(times=3)
    assert one.ray.closed == 1
    assert one.endpoints.hosts.all().hosts == ()


def test_a_replica_runs_on_every_host_that_was_started_for_its_engine(leader: Callable[[], Leader]) -> None:
    """Each host of Ray's has one replica; when one of them drains, its replica ends since the other one is ready."""
    one = leader()
    create(one, min=2)
    one.tick(times=3)
    joined = [one.join(name) for name in sorted(one.ray.hosts)]
    one.tick()
    assert sorted(row.host for row in one.endpoints.hosts.all().placements) == sorted(one.ray.hosts)
    ids = {row.host: row.id for row in one.endpoints.hosts.all().placements}
    for place, host in enumerate(joined):
        engines = {ids[host.host]: HostedEngine(state="READY", address=f"tcp://h:{place}")}
        one.endpoints.hosts.beat(msgspec.structs.replace(host, engines=engines, draining=not place, beat=2))
    one.tick()
    assert [row.host for row in one.endpoints.hosts.all().placements] == [joined[1].host]


def test_an_update_that_says_nothing_stays_on_the_same_hosts(leader: Callable[[], Leader]) -> None:
    """An update without placement and scale keeps the scale; one with placement "local" gives it up; a server with
    a runtime gives it to new endpoints.
    """
    one = leader()
    create(one, min=2)
    one.endpoints.mark_ready("chat", 1)
    plain = {key: value for key, value in ENTITY.items() if key != "scale"}
    one.endpoints.update_config("chat", {"served_entities": [plain]})
    assert one.endpoints.config("chat", 2).served_entities[0].scale == Scale(min=2, resources={"GPU": 1.0})
    one.endpoints.mark_ready("chat", 2)
    one.endpoints.update_config("chat", {"served_entities": [plain | {"placement": "local"}]})
    assert one.endpoints.config("chat", 3).served_entities[0].scale is None
    with pytest.raises(InvalidField, match="scale"):
        one.endpoints.create({"name": "x", "config": {"served_entities": [ENTITY | {"placement": "local"}]}})
    with pytest.raises(InvalidField, match="replicas"):
        one.endpoints.create({"name": "x", "config": {"served_entities": [ENTITY | {"replicas": 2}]}})


def test_ray_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_entity: EntityConfig
) -> None:
    """Without Ray, both --runtime ray and an entity's scale are refused with the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_key(str(tmp_path / "key"))
    with pytest.raises(InvalidField, match=r"pip install 'mlflow-llm\[ray\]'"):
        ServerSettings(database="sqlite:///x.db", engine_key_file=str(tmp_path / "key"), runtime="ray")
    with pytest.raises(InvalidField, match=r"pip install 'mlflow-llm\[ray\]'"):
        locate((instant_entity,), {})
    with pytest.raises(InvalidField, match="--engine-key-file"):
        ServerSettings(runtime="ray")


@pytest.fixture
def instant_entity() -> EntityConfig:
    return EntityConfig(name="one", entity_name="m", entity_version="1", placement="hosts", scale=Scale())


def test_the_ray_process_answers_each_order_and_connects_again_later() -> None:
    """While the cluster is away each order is answered with the reason; failures of starts come with the report."""
    times = iter([0.0, 0.0, 1.0, AGAIN_SECONDS, AGAIN_SECONDS])
    tried: list[Launch] = []

    class Cluster:
        def obey(self, order: Order) -> dict[str, str]:
            return {"b": "no GPU"}

        def report(self) -> Report:
            return Report(hosts=(HostReport(name="a"),), failed={"c": "died"})

    def connect(launch: Launch) -> Cluster:
        tried.append(launch)
        if len(tried) == 1:
            raise ClusterError("away")
        return Cluster()

    lines = [msgspec.json.encode(one) for one in (LAUNCH, Order(), Order(), Order())]
    answers = io.BytesIO()
    obey_all(io.BytesIO(b"\n".join(lines) + b"\n"), answers, connect, clock=lambda: next(times))
    found = [msgspec.json.decode(line, type=Report) for line in answers.getvalue().splitlines()]
    assert [one.error for one in found] == ["away", "away", ""]
    assert found[2].failed == {"b": "no GPU", "c": "died"}
    assert tried == [LAUNCH, LAUNCH]


def test_an_actor_keeps_a_host_joined_until_it_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of an actor joins the database by the actor's name, for its engine alone; when the actor drains, the
    host leaves and the actor ends.
    """
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path / "state"))
    ended: list[str] = []

    class Actor(HostActor):
        def end(self) -> None:
            ended.append("ended")

    store = Store(f"sqlite:///{tmp_path}/serving.db")
    hosts = EndpointStore(store, locate=lambda entities: ()).hosts
    launch = msgspec.structs.replace(LAUNCH, database=f"sqlite:///{tmp_path}/serving.db", key="k" * 32)
    actor = Actor("ray-e-0", "e", "127.0.0.1", launch)
    try:
        until(lambda: len(hosts.all().hosts) == 1, 120)
        (host,) = hosts.all().hosts
        assert (host.host, host.offer.start, host.draining) == ("ray-e-0", Start(engine="e"), False)
        assert {"draining": False, "message": ""}.items() <= actor.report().items()
        assert actor.report()["pid"] > 0
    finally:
        actor.drain()
    until(lambda: bool(ended), 60)
    assert hosts.all().hosts == ()
    assert not (tmp_path / "state" / "ray" / "ray-e-0").exists()
    store.close()


def test_the_launch_names_the_store_and_grants_nothing_by_itself(tmp_path: Path) -> None:
    """Two services over one cluster have namespaces of their own, by their databases."""
    from mlflow_llm.serving.control.spec import ServeSpec

    key = str(tmp_path / "key")
    write_key(key)
    made = []
    for name in "ab":
        url = f"sqlite:///{tmp_path}/{name}.db"
        store = Store(url)
        spec = ServeSpec(settings=ServerSettings(database=url, engine_key_file=key, ray_address="ray:6379"))
        made.append(runtime.launch_of(spec, store))
        store.close()
    assert made[0].namespace != made[1].namespace
    assert (made[0].address, made[0].grants) == ("ray:6379", {})


def test_the_commands_of_the_page_are_understood() -> None:
    """The page's commands parse, and the scale that it shows is one; a running cluster executes them elsewhere."""
    page = Path(__file__).parents[4] / "docs" / "scale.md"
    block = re.search(r"## Hosts that Ray starts.*?```\n(.*?)```", page.read_text(), re.S)
    assert block is not None
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    ours = [line[1:] for line in lines if line[0] == "mlflow-llm"]
    assert [line[0] for line in ours] == ["serve", "endpoints", "engines"]
    serve = cli.commands["serve"].make_context("serve", ours[0][1:])
    assert (serve.params["runtime"], serve.params["ray_address"]) == ("ray", "ray-head:6379")
    group = cli.commands["endpoints"]
    assert isinstance(group, click.Group)
    update = group.commands["update"].make_context("update", ours[1][2:])
    assert Scale.read(msgspec.json.decode(update.params["scale"])).most == 4
