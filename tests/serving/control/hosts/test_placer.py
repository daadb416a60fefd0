"""The leader's placement of engines on joined hosts: where they go, and what moves them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from mlflow_llm.serving.control.hosts.hosted_engines import NO_HOST_SECONDS, HostedEngines
from mlflow_llm.serving.control.hosts.placer import LOOK_SECONDS, SILENT_SECONDS, Placer, WantedEngine, changes
from mlflow_llm.serving.control.model_sources import locate
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource, Route
from mlflow_llm.serving.endpoints.engine_hosts import (
    EngineHost,
    EngineState,
    HostDevice,
    HostedEngine,
    Offer,
    Placed,
    Placement,
    placement_key,
)
from mlflow_llm.serving.endpoints.gateways import Fence, Gateway, Lease, NotLeader
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import Conflict, InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings

GIB = 2**30
ENTITY = {"entity_name": "assistant", "entity_version": "1", "placement": "hosts"}


class Clock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def host(name: str, *, memory: int = 8, gpus: int = 0, draining: bool = False, **engines: EngineState) -> EngineHost:
    """Return a host whose placements ``engines`` are in these states."""
    return EngineHost(
        host=name,
        name=name,
        started_ms=0,
        generation=1,
        beat=0,
        draining=draining,
        offer=Offer(memory=memory, cpus=2, devices=(HostDevice(name="H100", memory=80),) * gpus),
        engines={
            one: HostedEngine(state=state, address=f"tcp://{name}:1", message="no memory" * (state == "FAILED"))
            for one, state in engines.items()
        },
    )


@pytest.fixture(scope="module")
def entity(instant_bundle: Bundle) -> EntityConfig:
    source = ModelSource(uri="models:/assistant/1", bundle=instant_bundle)
    return EntityConfig(name="chat", entity_name="assistant", entity_version="1", source=source, placement="hosts")


@pytest.fixture(scope="module")
def decide(entity: EntityConfig) -> Callable[..., tuple[list[str], list[str]]]:
    """Return ``decide(hosts, placements, replicas)``: the hosts of new placements, and the placements that end."""

    def call(hosts: tuple[EngineHost, ...], rows: dict[str, str], replicas: int = 1, **more: object) -> object:
        wanted = {"e": WantedEngine(entity=entity, replicas=replicas)} if replicas else {}
        placements = tuple(Placement(id=i, engine="e", host=h, entity=entity, created_ms=0) for i, h in rows.items())
        found = changes(wanted, Placed(hosts=hosts, placements=placements), **more)  # type: ignore[arg-type]
        return [one.host for one in found.add], sorted(found.remove)

    return call  # type: ignore[return-value]


def test_a_replica_goes_to_the_host_with_a_gpu_then_with_few_engines_then_with_much_memory(
    decide: Callable[..., tuple[list[str], list[str]]], entity: EntityConfig
) -> None:
    """A new replica goes where there is a GPU, else few engines, else much memory; each host has one of an engine."""
    assert decide((host("a"), host("b", memory=16)), {}) == (["b"], [])
    assert decide((host("a"), host("b", memory=16)), {}, replicas=3) == (["b", "a"], [])
    assert decide((host("a", gpus=1), host("b", memory=16)), {}) == (["a"], [])
    assert decide((host("a"), host("b", draining=True)), {}, replicas=2) == (["a"], [])
    other = Placement(id="0", engine="other", host="b", entity=entity, created_ms=0)
    wanted = {"e": WantedEngine(entity=entity, replicas=1), "other": WantedEngine(entity=entity, replicas=1)}
    placed = Placed(hosts=(host("a"), host("b", memory=16)), placements=(other,))
    assert [one.host for one in changes(wanted, placed).add] == ["a"]


def test_a_replica_that_needs_a_gpu_waits_for_a_host_with_one(entity: EntityConfig) -> None:
    """An engine whose settings name CUDA is placed on no host without a GPU."""
    source = msgspec.structs.replace(entity.model, engine=EngineSettings(device="cuda"))
    wanted = {"e": WantedEngine(entity=msgspec.structs.replace(entity, source=source), replicas=1)}
    assert not changes(wanted, Placed(hosts=(host("a"),)))
    assert [one.host for one in changes(wanted, Placed(hosts=(host("a"), host("b", gpus=1)))).add] == ["b"]


def sized(entity: EntityConfig, gib: float, **settings: object) -> EntityConfig:
    """Return ``entity`` with so many GiB of weights, and engine settings."""
    bundle = msgspec.structs.replace(entity.model.bundle, weight_bytes=int(gib * GIB))
    engine = EngineSettings(**settings)  # type: ignore[arg-type]
    source = msgspec.structs.replace(entity.model, bundle=bundle, engine=engine)
    return msgspec.structs.replace(entity, source=source)


def test_a_replica_goes_only_where_its_memory_is_left(entity: EntityConfig) -> None:
    """A host is chosen only if what it offers, less what is placed on it, holds the weights and the KV cache that is
    set; on a GPU, the GPU's memory counts, unless the settings name the CPU.
    """
    small, large = host("small", memory=4 * GIB), host("large", memory=10 * GIB)

    def chosen(one: EntityConfig, *hosts: EngineHost, others: dict[str, EntityConfig] | None = None) -> list[str]:
        rows = {name: Placement(id=name, engine="o", host=name, entity=e, created_ms=0)
                for name, e in (others or {}).items()}  # fmt: skip
        wanted = {"e": WantedEngine(entity=one, replicas=1)}
        return [row.host for row in changes(wanted, Placed(hosts=hosts, placements=(*rows.values(),)), used={"o"}).add]

    assert chosen(sized(entity, 4), small, large) == ["large"]
    assert chosen(sized(entity, 4), small) == ["small"]
    assert chosen(sized(entity, 4, kv_cache_memory=1), small) == []
    assert chosen(sized(entity, 4), small, large, others={"large": sized(entity, 1)}) == ["small"]
    assert chosen(sized(entity, 4), large, others={"large": sized(entity, 6.5)}) == []
    gpu = msgspec.structs.replace(
        small, offer=Offer(memory=GIB, cpus=2, devices=(HostDevice(name="H100", memory=80 * GIB),))
    )
    assert chosen(sized(entity, 70), gpu) == ["small"]
    assert chosen(sized(entity, 70), gpu, others={"small": sized(entity, 20)}) == []
    assert chosen(sized(entity, 70), gpu, others={"small": sized(entity, 20, device="cpu")}) == ["small"]
    assert chosen(sized(entity, 2, device="cpu"), gpu) == []


def test_a_refusal_says_what_was_needed_and_offered(endpoints: EndpointStore, entity: EntityConfig) -> None:
    """An engine that no host has memory for fails with what it needs, and what each host offers and has left."""
    clock, large = Clock(), sized(entity, 3)
    hosted, key = HostedEngines(endpoints.hosts, monotonic=clock), placement_key(large)
    endpoints.hosts.join(host("a", memory=2 * GIB))
    endpoints.hosts.join(host("b", memory=8 * GIB, draining=True))
    hosted.look([key])
    assert hosted.problem(key, large) == ""
    clock.now += NO_HOST_SECONDS
    assert hosted.problem(key, large) == (
        "it needs 3.00 GiB of memory, and no joined host takes it: host a offers 2.00 GiB, of which 2.00 GiB are left; "
        "host b drains"
    )
    endpoints.hosts.join(host("c", memory=4 * GIB))
    assert hosted.problem(key, large) == ""  # the leader places it there next


def test_a_replica_moves_from_a_host_that_fails_drains_or_has_gone(
    decide: Callable[..., tuple[list[str], list[str]]],
) -> None:
    """A replica gets a successor on another host; on a draining host it ends only when that one is ready."""
    assert decide((host("a", i="FAILED"), host("b")), {"i": "a"}) == (["b"], [])
    assert decide((host("a", i="FAILED"), host("b", j="LOADING")), {"i": "a", "j": "b"}) == ([], [])
    assert decide((host("a", i="FAILED"), host("b", j="READY")), {"i": "a", "j": "b"}) == ([], ["i"])
    assert decide((host("a", draining=True, i="READY"), host("b")), {"i": "a"}) == (["b"], [])
    both = (host("a", draining=True, i="READY"), host("b", j="LOADING"))
    assert decide(both, {"i": "a", "j": "b"}) == ([], [])
    assert decide((both[0], host("b", j="READY")), {"i": "a", "j": "b"}) == ([], ["i"])
    assert decide((host("b"),), {"i": "a"}) == (["b"], ["i"])
    assert decide((host("a", i="READY"),), {"i": "a"}) == ([], [])


def test_replicas_too_many_end_and_an_engine_in_use_stays(
    decide: Callable[..., tuple[list[str], list[str]]],
) -> None:
    """Fewer replicas end the younger ones; an engine that nothing wants ends when no gateway uses it."""
    hosts = (host("a", i="READY"), host("b", j="READY"))
    assert decide(hosts, {"i": "a", "j": "b"}, replicas=1) == ([], ["j"])
    assert decide(hosts, {"i": "a", "j": "b"}, replicas=0, used={"e"}) == ([], [])
    assert decide(hosts, {"i": "a", "j": "b"}, replicas=0) == ([], ["i", "j"])


@pytest.fixture
def fence(endpoints: EndpointStore) -> Fence:
    """Return the fence of a gateway that leads."""
    gateway = Gateway(gateway="g", name="g", started_ms=0, serving=True, beat=0)
    fence = endpoints.gateways.write(gateway, fence=None, take=Lease())
    assert fence is not None
    return fence


def beat(endpoints: EndpointStore, one: EngineHost) -> EngineHost:
    """Write the next beat of a host, which has all that is placed on it ready."""
    placed = endpoints.hosts.beat(msgspec.structs.replace(one, beat=one.beat + 1))
    ready = {row.id: HostedEngine(state="READY", address=f"tcp://{one.name}:1") for row in placed}
    new = msgspec.structs.replace(one, beat=one.beat + 2, engines=ready)
    endpoints.hosts.beat(new)
    return new


def test_a_silent_host_loses_its_engines_to_another(endpoints: EndpointStore, fence: Fence) -> None:
    """The engine of a host that stops beating is placed on another one, by the leader's clock, and both are said."""
    endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY]}})
    a, b, clock = endpoints.hosts.join(host("a")), endpoints.hosts.join(host("b", memory=4)), Clock()
    placer = Placer(endpoints, monotonic=clock)

    def turn() -> list[str]:
        clock.now += LOOK_SECONDS
        placer.tick(endpoints.states(), fence)
        return [one.host for one in endpoints.hosts.all().placements]

    assert turn() == ["a"]
    a, b = beat(endpoints, a), beat(endpoints, b)
    said = {"served_entity": "assistant-1", "host": "a", "state": "READY", "address": "tcp://a:1"}
    assert endpoints.get("chat")["hosts"] == [said]
    began = clock.now
    while turn() == ["a"]:
        b = beat(endpoints, b)
        assert clock.now - began < 2 * SILENT_SECONDS
    assert clock.now - began >= SILENT_SECONDS
    assert endpoints.get("chat")["hosts"] == [{"served_entity": "assistant-1", "host": "b", "state": "LOADING"}]
    beat(endpoints, a)  # it was only cut off: it is there again, and has nothing to run
    assert [one.host for one in endpoints.hosts.all().hosts] == ["a", "b"]
    assert endpoints.hosts.beat(a) == ()
    endpoints.delete("chat")
    assert turn() == []


def test_only_the_leader_places(endpoints: EndpointStore, fence: Fence) -> None:
    """A gateway that does not lead any more places nothing."""
    endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY]}})
    endpoints.hosts.join(host("a"))
    placer = Placer(endpoints)
    with pytest.raises(NotLeader):
        placer.tick(endpoints.states(), Fence(holder=fence.holder, number=fence.number - 1))
    assert endpoints.hosts.all().placements == ()


def test_one_process_acts_for_a_host(endpoints: EndpointStore) -> None:
    """Each start of a host's command has the next generation, and a beat of the one before it is refused."""
    first = endpoints.hosts.join(host("a"))
    second = endpoints.hosts.join(host("a"))
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(Conflict, match="another process has joined as host a"):
        endpoints.hosts.beat(first)
    endpoints.hosts.leave(first)
    assert len(endpoints.hosts.all().hosts) == 1
    endpoints.hosts.leave(second)
    assert endpoints.hosts.all().hosts == ()


def test_a_gateway_says_why_an_engine_does_not_run(endpoints: EndpointStore, entity: EntityConfig) -> None:
    """An engine has failed if every host that could run it says why not, or if no host comes for a while."""
    clock = Clock()
    hosted, key = HostedEngines(endpoints.hosts, monotonic=clock), placement_key(entity)

    def problem() -> str:
        clock.now += LOOK_SECONDS
        hosted.look([key])
        return hosted.problem(key, entity)

    assert problem() == ""
    clock.now += NO_HOST_SECONDS
    assert problem() == "no host has joined this database to run engines (mlflow-llm engine --join)"
    endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY]}})
    a = endpoints.hosts.join(host("a"))
    Placer(endpoints).tick(endpoints.states(), None)
    assert problem() == ""
    (row,) = endpoints.hosts.all().placements
    assert row.engine == key
    endpoints.hosts.beat(msgspec.structs.replace(a, engines={row.id: HostedEngine(state="FAILED", message="no room")}))
    assert problem() == "host a: no room"
    endpoints.hosts.join(host("b"))
    assert problem() == ""  # the leader will try that one


def test_an_update_stays_off_the_gateways(endpoints: EndpointStore, entity: EntityConfig) -> None:
    """An update of an endpoint whose engines are on other hosts goes to joined hosts, unless it says "local"."""
    plain = {key: value for key, value in ENTITY.items() if key != "placement"}
    elsewhere = msgspec.structs.replace(entity.model, addresses=("tcp://host1:5601",), key_file="/key")
    named = msgspec.structs.replace(entity, source=elsewhere, placement=None)
    route = Route(served_model_name=named.name, traffic_percentage=100)
    endpoints.declare("chat", EndpointConfig(served_entities=(named,), routes=(route,)))
    endpoints.mark_ready("chat", 1)
    for version, given, found in ((2, {}, "hosts"), (3, {"placement": "local"}, "local"), (4, {}, None)):
        endpoints.update_config("chat", {"served_entities": [plain | given]})
        assert endpoints.config("chat", version).served_entities[0].placement == found
        endpoints.mark_ready("chat", version)


def test_a_server_that_hosts_cannot_join_refuses_the_placement(entity: EntityConfig) -> None:
    """Without a database or the engines' key, engines are not placed on joined hosts, and nothing is looked up."""
    asked = msgspec.structs.replace(entity, source=None)
    with pytest.raises(InvalidField, match=r"served_entities\[0\].placement.*--engine-key-file"):
        locate((asked,), {}, has_hosts=False, find=lambda *_: ())
    with pytest.raises(InvalidField, match=r"placement.*--database"):
        ServerSettings(placement="hosts", engine_key_file="/key")
    assert ServerSettings(placement="hosts", engine_key_file="/key", database="sqlite:///x.db").has_hosts


def test_settings_that_do_not_go_with_the_placement_are_refused(endpoints: EndpointStore) -> None:
    """Provisioned throughput, scale to zero and a number of local replicas are refused by name."""
    for field, value in (("max_provisioned_throughput", 100), ("scale_to_zero_enabled", True)):
        with pytest.raises(InvalidField, match=f"{field}.*placement 'hosts'"):
            endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY | {field: value}]}})
    local = ENTITY | {"placement": "local", "replicas": 2}
    with pytest.raises(InvalidField, match=r"replicas.*placement is 'hosts'"):
        endpoints.create({"name": "chat", "config": {"served_entities": [local]}})
