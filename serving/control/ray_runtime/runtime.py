"""The leader's part: it keeps the hosts of entities with ``scale`` as many as they should be, and says what they wait
for.

The hosts themselves join the database as any other host does, and engines are placed on them as on those
(``control.hosts``). Only their number and their ends are decided here, under the lease of the leader.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from ...endpoints.config import EntityConfig
from ...endpoints.engine_hosts import EngineHost, Placed, Start, expected, placement_key
from ...endpoints.gateways import Fence
from ...endpoints.scale import Scale
from ...endpoints.store import EndpointState, EndpointStore
from ...interface.errors import PackagingError
from ...interface.settings import GRANTED
from ...metering.store.identity import ensure_identity
from ...metering.store.store import Store
from ...supervision.supervisor import EngineStatus
from ...transport.auth import read_key
from ..known_configs import KnownConfigs
from ..spec import ServeSpec
from .decisions import WantedHosts, decide, waits_for
from .host_count import HostCount
from .link import RayProcess
from .messages import Launch, Order, Report, host_name, is_for

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
PAUSE_SECONDS = 15.0
"""How long a host whose start has failed is not started again."""
CONNECTING = "the leader connects to Ray"
OF_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")  # where hosts find models, if their nodes do not say it


class Link(Protocol):
    """The way to Ray; see ``RayProcess``."""

    @property
    def is_free(self) -> bool: ...
    def receive(self) -> Report | None: ...
    def send(self, order: Order) -> None: ...
    def close(self) -> None: ...


class RayRuntime:
    """The hosts that Ray starts, by the gateway that leads. Owned by the reconciler's thread.

    ``launch`` says how they are started, and raises ``PackagingError``; ``connect`` opens the way to Ray, which only a
    leader with such an entity has.
    """

    def __init__(
        self,
        endpoints: EndpointStore,
        launch: Callable[[], Launch],
        *,
        connect: Callable[[Launch], Link] = RayProcess,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        settle_seconds: float = 60.0,
    ) -> None:
        self._endpoints, self._launch, self._connect = endpoints, launch, connect
        self._clock, self._monotonic, self._settle_seconds = clock, monotonic, settle_seconds
        self._configs = KnownConfigs(endpoints)
        self._link: Link | None = None
        self._drain_seconds = 0.0
        self._report: Report | None = None
        self._counts: dict[str, HostCount] = {}
        self._failed: dict[str, tuple[float, str]] = {}  # when and why a start failed, by name
        self._looked_at = monotonic() - LOOK_SECONDS

    def tick(
        self, states: Iterable[EndpointState], fence: Fence | None, status: Callable[[str], EngineStatus | None]
    ) -> None:
        """Look after the hosts, if it is time to and this gateway leads. Raises ``NotLeader``, ``Unavailable``."""
        if fence is None:
            self.close()
            return
        if self._monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._monotonic()
        entities = self._entities(states)
        if not entities and self._link is None:
            return
        placed = self._endpoints.hosts.all()
        numbers = self._numbers(entities, placed, status)
        if self._link is None:
            try:
                launch = self._launch()
                self._link, self._drain_seconds = self._connect(launch), launch.drain_timeout
            except PackagingError as error:
                self._report = Report(error=str(error))
        order = Order()
        if self._link is not None:
            self._hear(self._link)
            order = self._decide(entities, numbers, placed)
            if self._link.is_free:
                self._link.send(order)
        self._expect(entities, order, placed, fence)
        if not entities and self._report is not None and not (self._report.hosts or self._report.error):
            self.close()

    def close(self) -> None:
        """Let go of Ray; the hosts go on, and another leader finds them."""
        if self._link is not None:
            self._link.close()
        self._link, self._report = None, None
        self._counts, self._failed = {}, {}

    def _entities(self, states: Iterable[EndpointState]) -> dict[str, EntityConfig]:
        """Return the entities whose hosts Ray starts, by their engines; of several with one engine, that with the most
        hosts."""
        found: dict[str, EntityConfig] = {}
        self._configs.begin()
        for state in states:
            for version in (state.active_version, state.pending_version):
                config = None if version is None else self._configs.of(state, version)
                for entity in () if config is None else config.served_entities:
                    if entity.scale is not None:
                        key = placement_key(entity)
                        if key not in found or _bounds(found[key]) < _bounds(entity):
                            found[key] = entity
        return found

    def _numbers(
        self, entities: dict[str, EntityConfig], placed: Placed, status: Callable[[str], EngineStatus | None]
    ) -> dict[str, int]:
        self._counts = {key: count for key, count in self._counts.items() if key in entities}
        numbers: dict[str, int] = {}
        for key, entity in entities.items():
            if key not in self._counts:
                there = sum(not host.draining for host in placed.started_for(key))
                self._counts[key] = HostCount(there, settle_seconds=self._settle_seconds)
            numbers[key] = self._counts[key].look(_scale(entity), status(key), self._monotonic())
        return numbers

    def _hear(self, link: Link) -> None:
        """Take what Ray has said since."""
        report = link.receive()
        if report is None:
            return
        now = self._monotonic()
        if report.error and (self._report is None or self._report.error != report.error):
            logger.warning("Ray: %s", report.error)
        if not report.error and (self._report is None or self._report.error):
            logger.warning("connected to Ray, which has %d hosts of this service", len(report.hosts))
        for name, why in report.failed.items():
            logger.warning("host %s was not started: %s", name, why)
            self._failed[name] = (now, why)
        for name in [host.name for host in report.hosts if host.answers]:
            self._failed.pop(name, None)
        self._report = report

    def _decide(self, entities: dict[str, EntityConfig], numbers: dict[str, int], placed: Placed) -> Order:
        if self._report is None or self._report.error:
            return Order()  # only to hear what there is
        now = self._monotonic()
        wanted = {
            key: WantedHosts(number=numbers[key], resources=_scale(entity).resources)
            for key, entity in entities.items()
        }
        hosts = {host.host: host for host in placed.hosts if host.offer.start is not None}
        kept = {row.engine for row in placed.placements if row.host in hosts}
        ready = {
            host.name
            for host in hosts.values()
            if not host.draining and any(said.state == "READY" for said in host.engines.values())
        }
        paused = {name for name, (at, _) in self._failed.items() if now - at < PAUSE_SECONDS}
        order = decide(
            wanted,
            self._report.hosts,
            kept=kept,
            ready=ready,
            paused=paused,
            now=self._clock(),
            drain_seconds=self._drain_seconds,
        )
        for one in order.start:
            logger.warning("Ray starts host %s", one.name)
        for name in (*order.drain, *order.kill):
            logger.warning("host %s ends", name)
        return order

    def _expect(self, entities: dict[str, EntityConfig], order: Order, placed: Placed, fence: Fence) -> None:
        """Write which hosts have been ordered and not joined yet, where that has changed."""
        joined = {host.host for host in placed.hosts if host.generation}
        rows: dict[str, EngineHost] = {}
        for key, entity in entities.items():
            names = self._ordered(key, order)
            if not names and not any(is_for(name, key) for name in joined):
                names = [host_name(key, 0)]
            for name in names:
                if name not in joined:
                    rows[name] = expected(name, self._start(name, key, entity), int(self._clock() * 1000))
        before = {host.host: host.offer.start for host in placed.hosts if not host.generation}
        if before != {name: row.offer.start for name, row in rows.items()}:
            self._endpoints.hosts.expect(tuple(rows.values()), fence)

    def _ordered(self, engine: str, order: Order) -> list[str]:
        """Return the names of the hosts of an engine that Ray has or is told to start, or could not start."""
        over = {*order.drain, *order.kill}
        there = [host.name for host in self._report.hosts if not host.draining] if self._report is not None else []
        names = [*there, *(one.name for one in order.start), *self._failed]
        return [name for name in dict.fromkeys(names) if is_for(name, engine) and name not in over]

    def _start(self, name: str, engine: str, entity: EntityConfig) -> Start:
        """Return what is known of a host that has not joined."""
        if self._report is None:
            return Start(engine=engine, state="ORDERED", message=CONNECTING)
        if self._report.error:
            return Start(engine=engine, state="FAILED", message=self._report.error)
        if name in self._failed:
            return Start(engine=engine, state="FAILED", message=self._failed[name][1])
        host = next((one for one in self._report.hosts if one.name == name), None)
        if host is not None and host.message:
            return Start(engine=engine, state="FAILED", message=host.message)
        if host is not None and host.answers:
            return Start(engine=engine, state="ORDERED", message="its process starts on its node")
        return Start(engine=engine, state="ORDERED", message=waits_for(self._report, _scale(entity).resources))


def _scale(entity: EntityConfig) -> Scale:
    assert entity.scale is not None
    return entity.scale


def _bounds(entity: EntityConfig) -> tuple[int, int]:
    return _scale(entity).min, _scale(entity).most


def launch_of(spec: ServeSpec, store: Store) -> Launch:
    """Return how the hosts of a server are started; it has a database and an engine key. Raises ``PackagingError``."""
    settings = spec.settings
    assert settings.database is not None
    key = read_key(settings.engine_key_file).decode("latin-1")
    grants = {name: msgspec.to_builtins(spec.engine[name]) for name in GRANTED if spec.engine.get(name)}
    return Launch(
        address=settings.ray_address,
        namespace=f"mlflow-llm-{ensure_identity(store).store_id}",
        database=settings.database,
        key=key,
        drain_timeout=settings.drain_timeout,
        grants=grants,
        environment={name: os.environ[name] for name in OF_MLFLOW if os.environ.get(name)},
    )
