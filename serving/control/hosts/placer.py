"""The leader's part: which joined host runs which engine.

An engine has at most one replica on a host, which has memory for it (``host_room``). A replica is replaced when its
host is silent, drains or reports a failure; it ends on a draining host only once the others are ready. An engine that
no config wants any more stays until no gateway has requests on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct

from ...endpoints.config import EntityConfig
from ...endpoints.engine_hosts import Changes, EngineHost, Placed, Placement, new_placement, placement_key
from ...endpoints.gateways import Fence
from ...endpoints.store import EndpointState, EndpointStore
from ...metering.store.staleness import StalenessDetector
from ..known_configs import KnownConfigs
from .host_room import has_room, may_run, room

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SILENT_SECONDS = 6.0
"""A host whose beat has not changed for so long, by the leader's own clock, is gone."""


class WantedEngine(Struct, frozen=True, kw_only=True):
    """An engine that a config wants on joined hosts, with its number of replicas."""

    entity: EntityConfig
    replicas: int


class Placer:
    """The placement of engines on joined hosts, by the gateway that leads. Owned by the reconciler's thread."""

    def __init__(
        self,
        endpoints: EndpointStore,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints, self._clock, self._monotonic = endpoints, clock, monotonic
        self._beats = StalenessDetector(SILENT_SECONDS, monotonic=monotonic)
        self._looked_at = monotonic() - LOOK_SECONDS
        self._configs = KnownConfigs(endpoints)

    def tick(self, states: Iterable[EndpointState], fence: Fence | None) -> None:
        """Bring the placements up to date, if it is time to. Raises ``NotLeader``, ``Unavailable``."""
        if self._monotonic() - self._looked_at < LOOK_SECONDS:
            return
        hosts = self._endpoints.hosts
        placed = hosts.all()
        if self._monotonic() - self._looked_at > SILENT_SECONDS:  # this gateway could not look: that is no silence
            self._beats.observe({})
        self._looked_at = self._monotonic()
        silent = self._beats.observe({one.host: (one.generation, one.beat) for one in placed.hosts if one.generation})
        gone = tuple(one for one in placed.hosts if one.host in silent)
        wanted = self._wanted(states, placed)
        if not (placed.placements or wanted or gone):
            return
        left = Placed(
            hosts=tuple(one for one in placed.hosts if one not in gone),
            placements=tuple(one for one in placed.placements if one.host not in silent),
        )
        used = {engine for one in self._endpoints.gateways.all() for engine in one.engines}
        found = changes(wanted, left, used=used, now_ms=int(self._clock() * 1000))
        if gone or found:
            hosts.change(Changes(add=found.add, remove=found.remove, gone=gone), fence)
            self._say(gone, found, placed)

    def _wanted(self, states: Iterable[EndpointState], placed: Placed) -> dict[str, WantedEngine]:
        wanted: dict[str, WantedEngine] = {}
        self._configs.begin()
        for state in states:
            for version in (state.active_version, state.pending_version):
                config = None if version is None else self._configs.of(state, version)
                for entity in () if config is None else config.served_entities:
                    if entity.is_hosted:
                        key, number = placement_key(entity), entity.replicas or 1
                        if entity.scale is not None:  # its runtime decides how many: one on each host started for it
                            number = sum(may_run(host, entity) for host in placed.started_for(key)) or 1
                        known = wanted.get(key)
                        if known is None or known.replicas < number:
                            wanted[key] = WantedEngine(entity=entity, replicas=number)
        return wanted

    def _say(self, gone: Iterable[EngineHost], found: Changes, placed: Placed) -> None:
        hosts = {one.host: one.name for one in placed.hosts}
        for one in gone:
            logger.warning("host %s is silent; its engines are placed on others", one.name)
        for new in found.add:
            logger.warning("placed %s on host %s", new.entity.model.identity, hosts[new.host])


def changes(
    wanted: Mapping[str, WantedEngine], placed: Placed, *, used: Collection[str] = (), now_ms: int = 0
) -> Changes:
    """Return what has to change for every wanted engine to have its replicas; ``used`` are engines that gateways may
    still have requests on."""
    hosts = {one.host: one for one in placed.hosts}
    over = {row.id for row in placed.placements if row.host not in hosts or row.engine not in {*wanted, *used}}
    stays = [row for row in placed.placements if row.id not in over]
    add: list[Placement] = []
    remove: list[str] = []
    for engine, one in wanted.items():
        found = placed.of(engine)
        well = [(row, said) for row, host, said in found if not host.draining and said.state != "FAILED"]
        well.sort(key=lambda pair: pair[1].state != "READY")  # stable: the oldest first
        remove += [row.id for row, _ in well[one.replicas :]]
        if sum(said.state == "READY" for _, said in well) >= one.replicas:
            kept = {row.id for row, _ in well}
            remove += [row.id for row, _, _ in found if row.id not in kept]  # failed ones, and those of draining hosts
            continue
        taken = {row.host for row, _, _ in found}
        for _ in range(one.replicas - len(well)):
            rows = (*stays, *add)
            free = [host for host in hosts.values() if host.host not in taken and has_room(host, one.entity, rows)]
            if not free:
                break
            chosen = min(free, key=lambda host: _precedence(host, placed, add, one.entity))
            taken.add(chosen.host)
            add.append(new_placement(engine, chosen, one.entity, now_ms))
    remove += [row.id for row in placed.placements if row.id in over]
    return Changes(add=tuple(add), remove=tuple(dict.fromkeys(remove)))


def _precedence(
    host: EngineHost, placed: Placed, add: Iterable[Placement], entity: EntityConfig
) -> tuple[bool, int, int, str]:
    """Return the sort key of hosts for a new engine: a GPU where the settings want one or leave it open, then few
    engines, then much memory left."""
    rows = (*placed.placements, *add)
    number = sum(one.host == host.host for one in rows)
    lacks = not host.offer.devices and entity.model.engine.device != "cpu"
    return (lacks, number, -room(host, entity, rows), host.host)
