"""A gateway's view of its engines on joined hosts: where they answer, and why one does not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ...endpoints.config import EntityConfig
from ...endpoints.engine_hosts import EngineHosts, Placed
from ..engine_memory import GIB
from .host_room import has_room, needed, refusal

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

    def problem(self, engine: str, entity: EntityConfig) -> str:
        """Return why no replica of ``engine``, which is that of ``entity``, runs or is going to; "" while one does or
        is being loaded.

        Raises ``Unavailable``.
        """
        if not self._problem(engine, entity):
            return ""
        self._placed = self._hosts.all()  # a host may have joined since
        return self._problem(engine, entity)

    def _problem(self, engine: str, entity: EntityConfig) -> str:
        rows, found = self._placed.placements, self._placed.of(engine)
        if found:
            failed = [f"host {host.name}: {said.message}" for _, host, said in found if said.state == "FAILED"]
            taken = {host.host for _, host, _ in found}
            another = any(host.host not in taken and has_room(host, entity, rows) for host in self._placed.hosts)
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
        refusals = [refusal(host, entity, rows) for host in self._placed.hosts]
        if not all(refusals):
            return ""
        why = "; ".join(refusals)
        return f"it needs {needed(entity) / GIB:.2f} GiB of memory, and no joined host takes it: {why}"
