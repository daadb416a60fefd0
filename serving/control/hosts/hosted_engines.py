"""A gateway's view of its engines on joined hosts: where they answer, and why one does not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ...endpoints.engine_hosts import EngineHosts, Placed
from .placer import may_run

LOOK_SECONDS = 0.5
NO_HOST_SECONDS = 20.0
"""How long an engine may be without a host before it counts as failed: hosts and gateways start at the same time."""
ORDERED_SECONDS = 900.0
"""How long it may wait for a host that a runtime has been told to start: a cluster may add a node first."""


class HostedEngines:
    """The engines of served entities on joined hosts. Owned by the reconciler's thread."""

    def __init__(self, hosts: EngineHosts, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._hosts, self._monotonic = hosts, monotonic
        self._placed = Placed()
        self._looked_at = -LOOK_SECONDS
        self._without: dict[str, float] = {}  # by engine: since when it has had no host

    def look(self, engines: Iterable[str]) -> None:
        """Read the store again if that is due and any engine is on joined hosts. Raises ``Unavailable``."""
        wanted = set(engines)
        self._without = {engine: since for engine, since in self._without.items() if engine in wanted}
        if not wanted or self._monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._monotonic()
        self._placed = self._hosts.all()
        for engine in wanted:
            if self._placed.of(engine):
                self._without.pop(engine, None)
            else:
                self._without.setdefault(engine, self._monotonic())

    def addresses(self, engine: str) -> tuple[str, ...]:
        """Return where the replicas of ``engine`` answer."""
        return tuple(said.address for _, _, said in self._placed.of(engine) if said.state == "READY")

    def problem(self, engine: str) -> str:
        """Return why no replica of ``engine`` runs, or is going to; "" while one does or is being loaded.

        Raises ``Unavailable``.
        """
        if not self._problem(engine):
            return ""
        self._placed = self._hosts.all()  # a host may have joined since
        return self._problem(engine)

    def _problem(self, engine: str) -> str:
        found = self._placed.of(engine)
        if found:
            failed = [f"host {host.name}: {said.message}" for _, host, said in found if said.state == "FAILED"]
            taken, entity = {host.host for _, host, _ in found}, found[0][0].entity
            another = any(host.host not in taken and may_run(host, entity) for host in self._placed.hosts)
            return "; ".join(failed) if len(failed) == len(found) and not another else ""
        since = self._without.get(engine)
        if since is None or self._monotonic() - since < NO_HOST_SECONDS:
            return ""
        started = [host.offer.start for host in self._placed.started_for(engine) if host.offer.start is not None]
        if any(start.state != "FAILED" for start in started) and self._monotonic() - since < ORDERED_SECONDS:
            return ""
        if started:
            return "; ".join(dict.fromkeys(start.message or "its host takes no engine" for start in started))
        if not self._placed.hosts:
            return "no host has joined this database to run engines (mlflow-llm engine --join)"
        names = ", ".join(host.name for host in self._placed.hosts)
        return f"none of the joined hosts ({names}) takes it: they drain, or lack the device that its settings name"
