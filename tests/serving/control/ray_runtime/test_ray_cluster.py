"""Ray places the engine hosts of a server: a real Ray cluster of several nodes on this machine, and a real server.

A stream is held open by its engine, which takes no further step, while nodes come and go. One command runs this file,
which needs Ray (CONTRIBUTING.md); everywhere else it is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
from gated_core import steps_more
from instant_model import write_instant_model
from placed_core import MODEL, PLACED_CORE
from server_calls import BODY, asking, text_and_usage, until
from serving_process import Running, python_path, running

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli.model_options import endpoint_specs
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.endpoints.scale import Scale
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport.auth import write_key

ray = pytest.importorskip("ray", reason="hosts that Ray starts need the package ray (pip install 'mlflow-llm[ray]')")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own node processes
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]
STREAM = BODY | {"model": "chat", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
MEMORY = 100_000_000  # bytes of Ray's object store, which nothing here uses


class Service:
    """A server whose endpoint ``chat`` runs on hosts that Ray starts, one on each node with the resource ``engine``."""

    def __init__(self, cluster: Any, server: Running, model_dir: str) -> None:
        self.cluster, self.server, self.model_dir = cluster, server, model_dir

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=MEMORY)

    def hosts(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.server.url}/api/2.0/engine-hosts", timeout=240) as answer:
            found: list[dict[str, Any]] = json.load(answer)["hosts"]
        return found

    def ready(self) -> list[str]:
        """Return the names of the hosts whose engine is ready."""
        return [one["name"] for one in self.hosts() if [engine["state"] for engine in one["engines"]] == ["READY"]]

    def actors(self) -> list[tuple[str, int]]:
        """Return the names of the hosts' actors with the pids of their hosts."""
        rows = ray.util.list_named_actors(all_namespaces=True)
        found = [(one["name"], ray.get_actor(one["name"], namespace=one["namespace"])) for one in rows]
        return [(name, ray.get(actor.report.remote())["pid"]) for name, actor in found]

    def names(self) -> list[str]:
        return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]

    def node_of(self, name: str) -> Any:
        """Return the node of a host."""
        (namespace,) = {one["namespace"] for one in ray.util.list_named_actors(all_namespaces=True)}
        said = ray.get(ray.get_actor(name, namespace=namespace).report.remote())
        return next(node for node in self.cluster.worker_nodes if node.node_id == said["node"])

    def stream(self, pool: ThreadPoolExecutor) -> Future[tuple[str, dict[str, Any]]]:
        """Return the text and usage of a stream that has begun."""

        def read() -> tuple[str, dict[str, Any]]:
            with asking(self.server, STREAM) as answer:
                assert answer.status == 200
                return text_and_usage(answer.read())

        found = pool.submit(read)
        until(lambda: found.done() or self.running() == 1)
        return found

    def running(self) -> int:
        with urllib.request.urlopen(f"{self.server.url}/health", timeout=240) as answer:
            return int(json.load(answer)["endpoints"]["chat"]["running"])

    def text(self) -> tuple[str, dict[str, Any]]:
        """Return the undisturbed text and usage."""
        with asking(self.server, STREAM) as answer:
            return text_and_usage(answer.read())


def lose(service: Service, node: Any, name: str) -> None:
    """Let a node vanish with all that runs on it."""
    own = [one for one in psutil.process_iter(["cmdline"]) if f"--name {name} " in " ".join(one.info["cmdline"] or [])]
    lost = [child for one in own for child in (one, *one.children(recursive=True))]
    service.cluster.remove_node(node, allow_graceful=False)
    for process in lost:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from ray.cluster_utils import Cluster

    root = tmp_path_factory.mktemp("ray")
    llm.save_model(root / "saved", tiny_llama(), byte_tokenizer(chat_template=TEMPLATE))
    (found,) = endpoint_specs({"chat": str(root / "saved")}, {})
    instant = write_instant_model(root / "bundle")
    endpoint = EndpointSpec(
        name="chat",
        entity=str(root / "saved"),
        bundle=found.bundle,
        core=PLACED_CORE,
        engine=EngineSettings(idle_timeout=5.0),
        placement="hosts",
        scale=Scale(resources={"engine": 1.0}),
    )
    write_key(str(root / "key"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_LLM_STATE", str(root / "state"))
        patch.setenv("PYTHONPATH", python_path())
        patch.setenv(MODEL, instant.model_dir)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": MEMORY})
        try:
            cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=MEMORY)
            ray.init(address=cluster.address, log_to_driver=False)
            with running(
                instant,
                more=(endpoint,),
                database=f"sqlite:///{root}/serving.db",
                engine_key_file=str(root / "key"),
                ray_address=cluster.address,
                drain_timeout=120.0,
            ) as server:
                yield Service(cluster, server, instant.model_dir)
        finally:
            ray.shutdown()
            cluster.shutdown()


def held(service: Service, then: Callable[[], object]) -> tuple[str, dict[str, Any]]:
    """Return text and usage of a stream that is held until ``then`` is done.

    Each engine takes a few steps, which are enough for a new one's probe and never for the whole stream."""
    with ThreadPoolExecutor(1) as pool:
        with steps_more(service.model_dir, 5):
            found = service.stream(pool)
            then()
            assert not found.done()
        return found.result(240)


def test_a_node_is_lost_and_one_added_under_a_stream(service: Service) -> None:
    """When the node of the only engine vanishes, Ray starts the host on a node that is added, and the stream goes on
    there: its text and usage are those of an undisturbed one.
    """
    undisturbed = service.text()

    def swap() -> None:
        (name,) = service.ready()
        node = service.node_of(name)
        lose(service, node, name)
        until(lambda: service.ready() == [])
        service.add_node()
        until(lambda: len(service.ready()) == 1)

    assert held(service, swap) == undisturbed


def test_a_node_drains_by_notice_under_a_stream(service: Service) -> None:
    """The host on a node that Ray drains gets a successor on another node, and the stream goes on there."""
    undisturbed = service.text()
    (first,) = service.ready()

    def drain() -> None:
        node = service.node_of(first)
        service.add_node()
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", service.cluster.address]
        command += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "taken back", "--deadline-remaining-seconds", "3600"]
        subprocess.run(command, check=True, capture_output=True)
        until(lambda: service.ready() not in ([], [first]) and first not in service.ready())

    assert held(service, drain) == undisturbed
    until(lambda: first not in service.names())


def test_a_new_leader_adopts_the_hosts(service: Service) -> None:
    """When the leader's controller process is killed, its successor finds the actors that there are, and starts none;
    a stream does not notice.
    """
    undisturbed, before = service.text(), service.actors()

    def kill() -> None:
        (controller,) = [
            one
            for one in psutil.Process(service.server.process.pid).children(recursive=True)
            if "serving.control.main" in " ".join(one.cmdline())
        ]
        os.kill(controller.pid, signal.SIGKILL)
        until(lambda: service.server.log().count("connected to Ray") >= 2)
        until(lambda: len(service.ready()) == 1)

    assert held(service, kill) == undisturbed
    assert service.actors() == before
