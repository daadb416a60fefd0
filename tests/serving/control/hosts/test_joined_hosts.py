"""Joined hosts run what a gateway places on them: agents and a reconciler in this process, over one database."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from instant_model import write_instant_model
from server_calls import until
from serving_process import INSTANT_CORE, free_port

from mlflow_llm.serving.control.autoscaler import Autoscaler
from mlflow_llm.serving.control.following.alias_process import Target
from mlflow_llm.serving.control.following.follower import AliasFollower
from mlflow_llm.serving.control.hosts.agent import HostAgent, reachable
from mlflow_llm.serving.control.hosts.host_identity import HostIdentity
from mlflow_llm.serving.control.model_sources import with_files
from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.control.reconciler import Reconciler
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.engine_hosts import EngineHosts, Offer
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.supervision.supervisor import Supervisor
from mlflow_llm.serving.supervision.warm_up import generate_one
from mlflow_llm.serving.transport.auth import write_key

ENTITY = {"entity_name": "assistant", "entity_version": "1", "placement": "hosts"}
GIB = 2**30


class Gateway:
    """A reconciler with a database, and the agents of the hosts that join it."""

    def __init__(self, place: Path, bundle: Bundle) -> None:
        self.key_file = str(place / "key")
        write_key(self.key_file)
        self._place, self.bundle = place, bundle
        self.store = Store(f"sqlite:///{place / 'serving.db'}")
        self.engine = EngineSettings(idle_timeout=0.3)
        self.now = 1000.0
        self.champion = "1"  # what the alias of that name means
        self.endpoints = EndpointStore(self.store, locate=self._locate, clock=lambda: self.now)
        self.supervisor = Supervisor(state_dir=str(place / "g"), probe=generate_one)
        self.plans = PlanDirectory(place)
        find = functools.partial(with_files, key_file=self.key_file)
        follower = AliasFollower(self.endpoints, locate=self._locate, poll=0.0, lookup=self._look_up)
        self.reconciler = Reconciler(
            self.endpoints, self.supervisor, self.plans, Autoscaler(), find=find, follower=follower
        )
        self._agents: list[tuple[HostAgent, threading.Thread]] = []

    def _locate(self, entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
        return tuple(map(self._source, entities))

    def _source(self, entity: EntityConfig) -> ModelSource:
        version = self.champion if entity.entity_version == "@champion" else entity.entity_version
        content = self.bundle.content_hash if version == "1" else f"version-{version}"
        bundle = msgspec.structs.replace(self.bundle, content_hash=content)
        return ModelSource(uri=f"models:/assistant/{version}", bundle=bundle, engine=self.engine, core=INSTANT_CORE)

    def _look_up(self, questions: Mapping[str, Iterable[str]]) -> dict[str, Target]:
        return {uri: Target(uri=f"models:/assistant/{self.champion}") for uri in questions}

    def served(self) -> dict[str, int]:
        """Return the shares of the versions that workers would send requests to, of those with an engine."""
        self.reconciler.tick()
        return {
            entity.config.model.identity.version: route.traffic_percentage
            for plan in self.plans.read().endpoints
            for entity in plan.entities
            for route in plan.routes
            if entity.addresses and route.served_model_name == entity.config.name
        }

    def join(self, name: str, *, missing: str = "", memory: int = GIB) -> HostAgent:
        """Return the agent of a host that joins, on a thread of its own. ``missing`` is the error of a lookup."""

        def find(entity: EntityConfig) -> EntityConfig:
            if missing:
                raise PackagingError(missing)
            assert entity.model.bundle.model_dir == ""  # a path of the gateway's means nothing on another host
            assert entity.model.uri.startswith("models:/assistant/")  # a version, which no alias moves
            return msgspec.structs.replace(entity, source=self._source(entity))

        agent = HostAgent(
            EngineHosts(self.store),
            Offer(memory=memory, cpus=1),
            host=name,
            name=name,
            listen=f"tcp://127.0.0.1:{free_port()}",
            key_file=self.key_file,
            find=find,
            probe=generate_one,
            drain_timeout=20.0,
            state_dir=str(self._place / name),
        )
        thread = threading.Thread(target=agent.run, name=f"host-{name}")
        thread.start()
        self._agents.append((agent, thread))
        return agent

    def end(self, agent: HostAgent) -> None:
        """Let a host end, while the gateway goes on."""
        agent.stop()
        thread = next(thread for one, thread in self._agents if one is agent)
        until(lambda: bool(self.reconciler.tick()) or not thread.is_alive())

    def state(self) -> tuple[str, str]:
        """Return the state of the endpoint after one more reconciliation: READY or not, and of its update."""
        self.reconciler.tick()
        found = self.endpoints.get("chat")["state"]
        return found["ready"], found["config_update"]

    def hosts(self) -> list[tuple[str, str]]:
        return [(one["host"], one["state"]) for one in self.endpoints.get("chat")["hosts"]]

    def addresses(self) -> tuple[str, ...]:
        """Return where workers would send requests."""
        return tuple(a for one in self.plans.read().endpoints for entity in one.entities for a in entity.addresses)

    def close(self) -> None:
        for agent, _ in self._agents:
            agent.stop()
            agent.stop()
        for _, thread in self._agents:
            thread.join()
        self.reconciler.close()
        self.supervisor.close()
        self.store.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    bundle = msgspec.structs.replace(write_instant_model(tmp_path / "bundle"), adapters={})
    # a short path: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mlh-") as place, contextlib.closing(Gateway(Path(place), bundle)) as made:
        yield made


@pytest.fixture
def create(gateway: Gateway) -> Callable[..., None]:
    def call(**entity: object) -> None:
        gateway.endpoints.create({"name": "chat", "config": {"served_entities": [ENTITY | entity]}})

    return call


def test_an_endpoint_is_served_by_hosts_and_moves_when_one_ends(gateway: Gateway, create: Callable[..., None]) -> None:
    """An endpoint's engine runs on the host that joined and none on the gateway's; an update that says nothing of it
    stays there; when its host drains, another one has the engine before the first ends.
    """
    first = gateway.join("a")
    create()
    until(lambda: gateway.state() == ("READY", "NOT_UPDATING"), 60)
    assert gateway.hosts() == [("a", "READY")]
    (address,) = gateway.addresses()
    assert address == gateway.endpoints.get("chat")["hosts"][0]["address"]
    assert not (Path(gateway.key_file).parent / "g").exists()  # the gateway has started no engine
    gateway.engine = EngineSettings(idle_timeout=0.3, max_num_seqs=3)
    again = {key: value for key, value in ENTITY.items() if key != "placement"}
    gateway.endpoints.update_config("chat", {"served_entities": [again]})
    until(lambda: gateway.state() == ("READY", "NOT_UPDATING"), 60)
    until(lambda: bool(gateway.reconciler.tick()) or (len(gateway.hosts()), len(gateway.addresses())) == (1, 1))
    assert gateway.addresses() != (address,)
    assert gateway.hosts() == [("a", "READY")]
    gateway.join("b", memory=2 * GIB)
    gateway.end(first)
    assert gateway.hosts() == [("b", "READY")]
    until(lambda: gateway.state() == ("READY", "NOT_UPDATING"), 60)
    assert [one["host"] for one in gateway.endpoints.get("chat")["hosts"]] == ["b"]
    until(
        lambda: (
            bool(gateway.reconciler.tick())
            or gateway.addresses() == (gateway.endpoints.get("chat")["hosts"][0]["address"],)
        )
    )


def test_a_followed_alias_moves_engines_on_joined_hosts(gateway: Gateway, create: Callable[..., None]) -> None:
    """An entity on joined hosts follows its alias by a canary, whose engine runs on the hosts too, and which takes its
    place when it is promoted; the gateway starts no engine.
    """
    gateway.join("a")
    canary = {"traffic_percentage": 20, "duration_s": 600, "min_requests": 0}
    create(entity_version="@champion", follow_alias=True, canary=canary)
    until(lambda: gateway.served() == {"1": 100}, 60)
    gateway.champion = "2"
    until(lambda: gateway.served() == {"1": 80, "2": 20}, 60)
    assert len(gateway.addresses()) == 2
    gateway.now += 601
    until(lambda: gateway.served() == {"2": 100}, 60)
    until(lambda: bool(gateway.reconciler.tick()) or [state for _, state in gateway.hosts()] == ["READY"], 60)
    until(lambda: bool(gateway.reconciler.tick()) or len(gateway.endpoints.hosts.all().placements) == 1, 60)
    assert not (Path(gateway.key_file).parent / "g").exists()


def test_a_host_that_cannot_run_a_model_says_why_and_another_one_does(
    gateway: Gateway, create: Callable[..., None]
) -> None:
    """An engine goes on to another host when one has no room for it; an update that no host can run fails with each
    host's reason, and the endpoint stays on what it had.
    """
    gateway.join("small", memory=1)
    Path(gateway.bundle.model_dir, "weights.bin").write_bytes(b"12345678")
    create()
    until(lambda: bool(gateway.reconciler.tick()) or gateway.hosts() == [("small", "FAILED")])
    said = gateway.endpoints.get("chat")["hosts"][0]["message"]
    assert said == "it has files of 0.00 GiB, and this host has 0.00 GiB left"
    until(lambda: gateway.state()[1] == "UPDATE_FAILED")
    assert "host small: it has files" in gateway.endpoints.get("chat")["state"]["message"]
    gateway.join("large")
    until(lambda: len(gateway.endpoints.hosts.all().hosts) == 2)
    gateway.endpoints.update_config("chat", {"served_entities": [ENTITY]})
    until(lambda: gateway.state() == ("READY", "NOT_UPDATING"), 60)
    until(lambda: bool(gateway.reconciler.tick()) or gateway.hosts() == [("large", "READY")])


def test_a_host_grants_code_of_a_model_itself(gateway: Gateway, create: Callable[..., None]) -> None:
    """A setting that runs a model's own code is refused by a host whose command line does not grant it."""
    gateway.engine = EngineSettings(trust_remote_code=True)
    gateway.join("a")
    create()
    until(lambda: gateway.state()[1] == "UPDATE_FAILED")
    assert "this host has not joined with -C trust_remote_code" in gateway.endpoints.get("chat")["state"]["message"]


def test_a_host_keeps_its_id_and_one_process_has_it(tmp_path: Path) -> None:
    """A host's id is the same after a restart of its command, which runs once; its address is one to connect to."""
    first = HostIdentity(tmp_path / "state")
    with pytest.raises(PackagingError, match="another `mlflow-llm engine --join` runs"):
        HostIdentity(tmp_path / "state")
    first.lock.release()
    second = HostIdentity(tmp_path / "state")
    assert second.host == first.host
    second.lock.release()
    assert reachable("tcp://[::1]:5601") == ("[::1]", 5601)
    with pytest.raises(PackagingError, match="name this host's address"):
        reachable("tcp://0.0.0.0:5601")
