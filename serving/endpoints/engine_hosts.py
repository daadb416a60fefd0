"""The hosts that have joined a database to run engines (``mlflow-llm engine --join``), and what is placed on them.

Each host replaces its own row every second: what it offers, and the state of the engines that were placed on it. The
leader of the gateways alone writes placements (``control.hosts.placer``), under the fence of its lease, and removes the
rows of hosts that have gone. A host's ``generation`` grows with every start of its command; a beat of an earlier
generation is refused, so that two processes never act for one host.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, TypeAlias

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..interface.errors import Conflict
from ..metering.store.store import Store
from ..metering.store.tables import engine_hosts, placements
from .config import EntityConfig
from .gateways import Fence, check_fence

EngineState: TypeAlias = Literal["LOADING", "READY", "FAILED"]


class HostDevice(Struct, frozen=True, kw_only=True):
    """A GPU of a host, with its memory in bytes."""

    name: str
    memory: int


class Start(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The start of a host by a runtime (``control.ray_runtime``) for the one engine ``engine`` (``placement_key``).

    The leader writes the rows of hosts that it has ordered and that have not joined yet, with the generation 0;
    ``message`` says what they wait for, or why they cannot be started."""

    engine: str
    state: Literal["JOINED", "ORDERED", "FAILED"] = "JOINED"
    message: str = ""


class Offer(Struct, frozen=True, kw_only=True):
    """The offer of a host: bytes of main memory that engines may take together, CPUs, and GPUs. A host that a runtime
    has started has ``start``, and is for one engine."""

    memory: int
    cpus: int
    devices: tuple[HostDevice, ...] = ()
    start: Start | None = None


class HostedEngine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host's report of an engine that was placed on it. A READY one answers at ``address`` (``tcp://host:port``);
    ``message`` says why a FAILED one does not."""

    state: EngineState
    address: str = ""
    message: str = ""


class EngineHost(Struct, frozen=True, kw_only=True):
    """A host that has joined. ``engines`` are its reports by the ids of placements; nothing new is placed on a
    ``draining`` host."""

    host: str
    name: str
    started_ms: int
    generation: int
    beat: int
    offer: Offer
    draining: bool = False
    engines: dict[str, HostedEngine] = {}


class Placement(Struct, frozen=True, kw_only=True):
    """A replica of the engine ``engine`` (``placement_key``) on a host, which runs it as ``entity`` says."""

    id: str
    engine: str
    host: str
    entity: EntityConfig
    created_ms: int


class Changes(Struct, frozen=True, kw_only=True):
    """The changes that a leader makes at once: new placements, the ids of those that are over, and hosts that have
    gone."""

    add: tuple[Placement, ...] = ()
    remove: tuple[str, ...] = ()
    gone: tuple[EngineHost, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.remove or self.gone)


class Placed(Struct, frozen=True, kw_only=True):
    """All hosts and placements as they were at one moment."""

    hosts: tuple[EngineHost, ...] = ()
    placements: tuple[Placement, ...] = ()

    def of(self, engine: str) -> tuple[tuple[Placement, EngineHost, HostedEngine], ...]:
        """Return the placements of ``engine`` on hosts that are there, with what these say of them."""
        hosts = {one.host: one for one in self.hosts}
        found = ((one, hosts[one.host]) for one in self.placements if one.engine == engine and one.host in hosts)
        return tuple((one, host, host.engines.get(one.id, HostedEngine(state="LOADING"))) for one, host in found)

    def started_for(self, engine: str) -> tuple[EngineHost, ...]:
        """Return the hosts that a runtime has started, or is to start, for ``engine``."""
        return tuple(one for one in self.hosts if one.offer.start is not None and one.offer.start.engine == engine)


def placement_key(entity: EntityConfig) -> str:
    """Return the key of a served entity's engine on joined hosts.

    Entities with the same weights, adapters and settings have the same key on every host and for every gateway, and
    share the engine; not so if a runtime starts hosts for one of them, or gives these other resources.
    """
    source = entity.model
    bundle = source.bundle
    draft = bundle.draft.content_hash if bundle.draft is not None else ""
    served = (bundle.content_hash, draft, bundle.tasks, bundle.embedding, sorted(bundle.adapters))
    runtime = () if entity.scale is None else ((entity.scale.runtime, entity.scale.resources),)
    described = msgspec.json.encode((*served, source.engine, source.core, *runtime), order="sorted")
    return hashlib.sha256(described).hexdigest()[:32]


_OFFER = msgspec.json.Decoder(Offer)
_REPORT = msgspec.json.Decoder(dict[str, HostedEngine])
_ENTITY = msgspec.json.Decoder(EntityConfig)


def placed_in(connection: sa.Connection) -> Placed:
    """Return all hosts, sorted by name, and all placements, the oldest first."""
    hosts = sa.select(engine_hosts).order_by(engine_hosts.c.name, engine_hosts.c.host)
    rows = sa.select(placements).order_by(placements.c.created_ms, placements.c.id)
    return Placed(
        hosts=tuple(map(_host, connection.execute(hosts))), placements=tuple(map(_placement, connection.execute(rows)))
    )


def _host(row: sa.Row) -> EngineHost:
    return EngineHost(
        host=row.host,
        name=row.name,
        started_ms=row.started_ms,
        generation=row.generation,
        beat=row.beat,
        draining=bool(row.draining),
        offer=_OFFER.decode(row.offer),
        engines=_REPORT.decode(row.report),
    )


def _placement(row: sa.Row) -> Placement:
    entity = _ENTITY.decode(row.entity)
    return Placement(id=row.id, engine=row.engine, host=row.host, entity=entity, created_ms=row.created_ms)


class EngineHosts:
    """The joined hosts and the placements of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> Placed:
        """Return all hosts and placements."""
        return self._store.read(placed_in)

    def join(self, host: EngineHost) -> EngineHost:
        """Write the row of a host whose command starts, and return it with its generation. What the host was running
        for an earlier generation stays placed on it."""

        def work(connection: sa.Connection) -> EngineHost:
            query = sa.select(engine_hosts).where(engine_hosts.c.host == host.host)
            found = connection.execute(query.with_for_update()).one_or_none()
            if found is None:
                new = msgspec.structs.replace(host, generation=max(host.generation, 1))
            else:
                before = _host(found)
                new = msgspec.structs.replace(host, generation=before.generation + 1, engines=before.engines)
            self._put(connection, new)
            return new

        return self._store.write(work)

    def beat(self, host: EngineHost) -> tuple[Placement, ...]:
        """Replace the row of ``host``, and return what is placed on it.

        Raises ``Conflict`` if another process has joined as this host since.
        """

        def work(connection: sa.Connection) -> tuple[Placement, ...]:
            query = sa.select(engine_hosts.c.generation).where(engine_hosts.c.host == host.host)
            found = connection.execute(query.with_for_update()).scalar_one_or_none()
            if found is not None and found != host.generation:
                raise Conflict(f"another process has joined as host {host.name}; this one is over")
            self._put(connection, host)
            rows = sa.select(placements).where(placements.c.host == host.host)
            return tuple(map(_placement, connection.execute(rows.order_by(placements.c.created_ms, placements.c.id))))

        return self._store.write(work, timeout=2.0)

    def _put(self, connection: sa.Connection, host: EngineHost) -> None:
        row = {name: getattr(host, name) for name in ("name", "started_ms", "generation", "beat", "draining")}
        row |= {"offer": msgspec.json.encode(host.offer).decode(), "report": msgspec.json.encode(host.engines).decode()}
        insert = self._store.insert(engine_hosts).values(host=host.host, **row)
        connection.execute(insert.on_conflict_do_update(index_elements=["host"], set_=row))

    def leave(self, host: EngineHost) -> None:
        """Remove the row of a host whose command ends, and what is placed on it."""

        def work(connection: sa.Connection) -> None:
            this = sa.and_(engine_hosts.c.host == host.host, engine_hosts.c.generation == host.generation)
            if connection.execute(sa.delete(engine_hosts).where(this)).rowcount:
                connection.execute(sa.delete(placements).where(placements.c.host == host.host))

        self._store.write(work, timeout=2.0)

    def expect(self, expected: tuple[EngineHost, ...], fence: Fence | None) -> None:
        """Replace the rows of the hosts that have been ordered and have not joined yet. Raises ``NotLeader``."""

        def work(connection: sa.Connection) -> None:
            check_fence(connection, fence)
            connection.execute(sa.delete(engine_hosts).where(engine_hosts.c.generation == 0))
            there = set(connection.execute(sa.select(engine_hosts.c.host)).scalars())
            for host in expected:
                if host.host not in there:
                    self._put(connection, host)

        self._store.write(work, timeout=2.0)

    def change(self, changes: Changes, fence: Fence | None) -> None:
        """Write the decisions of the leader. Raises ``NotLeader``."""

        def work(connection: sa.Connection) -> None:
            check_fence(connection, fence)
            for host in changes.gone:
                this = sa.and_(engine_hosts.c.host == host.host, engine_hosts.c.beat == host.beat)
                if connection.execute(sa.delete(engine_hosts).where(this)).rowcount:
                    connection.execute(sa.delete(placements).where(placements.c.host == host.host))
            if changes.remove:
                connection.execute(sa.delete(placements).where(placements.c.id.in_(changes.remove)))
            for one in changes.add:
                row = {name: getattr(one, name) for name in ("id", "engine", "host", "created_ms")}
                connection.execute(sa.insert(placements).values(**row, entity=msgspec.json.encode(one.entity).decode()))

        self._store.write(work, timeout=2.0)


def expected(name: str, start: Start, now_ms: int) -> EngineHost:
    """Return the row of a host that the leader has ordered, and which joins by this name."""
    offer = Offer(memory=0, cpus=0, start=start)
    return EngineHost(host=name, name=name, started_ms=now_ms, generation=0, beat=0, offer=offer)


def new_placement(engine: str, host: EngineHost, entity: EntityConfig, now_ms: int) -> Placement:
    """Return a new placement of an engine on ``host``."""
    return Placement(id=secrets.token_hex(8), engine=engine, host=host.host, entity=entity, created_ms=now_ms)
