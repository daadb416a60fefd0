"""The interface to Ray: the only module that imports it, in a process of its own and in the actors of the hosts."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from .actor import HostActor
from .messages import PREFIX, HostOrder, HostReport, Launch, Order, Report

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 0.5  # that a report waits for the actors
SILENT_SECONDS = 10.0  # after which an actor that has not answered counts as one that does not
STATISTICS = "RAY_USAGE_STATS_ENABLED"  # of a cluster that is started here: nothing is sent to anybody unless asked for
NOT_INSTALLED = "Ray is not installed where the leader runs: pip install 'mlflow-llm[ray]'"


class ClusterError(Exception):
    """The cluster cannot be used; the message says why."""


class RayCluster:
    """The actors of one service in a Ray cluster. Raises ``ClusterError`` if there is no cluster to connect to."""

    def __init__(self, launch: Launch) -> None:
        os.environ.setdefault(STATISTICS, "0")
        try:
            import ray
        except ImportError:
            raise ClusterError(NOT_INSTALLED) from None
        self._ray, self._launch = ray, launch
        try:
            ray.init(
                address=launch.address,
                namespace=launch.namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # of several kinds, by what is wrong with the address, the cluster or the versions
            where = launch.address or os.environ.get("RAY_ADDRESS") or "this host"
            raise ClusterError(f"no connection to Ray at {where}: {_line(error)}") from None
        self._asked: dict[str, Any] = {}  # the questions under way, by name
        self._known: dict[str, tuple[float, dict[str, Any]]] = {}  # the last answers, and when they came
        self._handles: dict[str, Any] = {}
        self._actor = _actor_class()

    def obey(self, order: Order) -> dict[str, str]:
        """Start, drain and end actors. Return why one could not be, by name."""
        failed: dict[str, str] = {}
        for one in order.start:
            try:
                self._start(one)
            except Exception as error:  # of Ray's, such as a resource that it does not take
                failed[one.name] = _line(error)
        for name in order.drain:
            if (handle := self._handle(name)) is not None:
                handle.drain.remote()
        for name in order.kill:
            if (handle := self._handle(name)) is not None:
                self._ray.kill(handle)
                self._forget(name)
        return failed

    def _start(self, order: HostOrder) -> None:
        resources = dict(order.resources)
        memory = resources.pop("memory", None)
        options: dict[str, Any] = {
            "name": order.name,
            "namespace": self._launch.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "max_concurrency": 4,
            "scheduling_strategy": "SPREAD",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
        }
        size = None if memory is None else int(memory)
        if size is not None:
            options["memory"] = size
        actor = self._actor.options(**options)
        self._handles[order.name] = actor.remote(order.name, order.engine, self._launch, size)

    def _handle(self, name: str) -> Any:
        """Return the actor of this name, None if there is none."""
        try:
            return self._handles.get(name) or self._ray.get_actor(name, namespace=self._launch.namespace)
        except ValueError:
            return None

    def _forget(self, name: str) -> None:
        for known in (self._asked, self._known, self._handles):
            known.pop(name, None)

    def report(self) -> Report:
        """Return what there is; actors that do not answer soon are reported by their last answer."""
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(PREFIX)]
        for gone in self._handles.keys() - set(names):
            self._forget(gone)
        for name in names:
            if name not in self._asked and (handle := self._handle(name)) is not None:
                self._handles[name] = handle
                self._asked[name] = handle.report.remote()
        asked = {question: name for name, question in self._asked.items()}
        if asked:
            self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        failed: dict[str, str] = {}
        for question, name in asked.items():
            if self._ray.wait([question], timeout=0)[0]:
                del self._asked[name]
                self._read(name, question, failed)
        leaving = self._leaving()
        hosts = tuple(self._host(name, leaving) for name in names if name not in failed)
        nodes = tuple(
            {key: float(value) for key, value in node["Resources"].items()}
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in leaving
        )
        return Report(hosts=hosts, failed=failed, nodes=nodes)

    def _read(self, name: str, question: Any, failed: dict[str, str]) -> None:
        from ray.exceptions import ActorDiedError, RayError

        try:
            self._known[name] = (time.monotonic(), self._ray.get(question))
        except ActorDiedError as error:
            _, last = self._known.get(name, (0.0, {}))
            if not last.get("draining"):
                failed[name] = _line(error)
            self._forget(name)
        except RayError:  # its node is gone, and Ray restarts it elsewhere
            self._known.pop(name, None)

    def _leaving(self) -> dict[str, float]:
        """Return the nodes that drain or are preempted, with the time at which they end; 0 for no time."""
        from ray._private.state import state  # where Ray's own Serve has it from: there is no public name

        return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}

    def _host(self, name: str, leaving: dict[str, float]) -> HostReport:
        at, said = self._known.get(name, (0.0, {}))
        if not said or time.monotonic() - at > SILENT_SECONDS:
            return HostReport(name=name)
        return HostReport(
            name=name,
            answers=True,
            draining=said["draining"],
            leaves_at=leaving.get(said["node"]),
            message=said["message"],
        )


def _actor_class() -> Any:
    import ray

    class EngineHost(HostActor):
        """The actor with the parts of it that need Ray."""

        def __init__(self, name: str, engine: str, launch: Launch, memory: int | None) -> None:
            context = ray.get_runtime_context()
            self._own, self._node = context.current_actor, context.get_node_id()
            super().__init__(name, engine, ray.util.get_node_ip_address(), launch, memory)

        def report(self) -> dict[str, Any]:
            return super().report() | {"node": self._node}

        def end(self) -> None:
            ray.kill(self._own)  # and for good: Ray would restart an actor whose process ends

    return ray.remote(EngineHost)


def _line(error: Exception) -> str:
    """Return the last line of an error's text that says something; Ray's have the traceback of the other side first."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]
