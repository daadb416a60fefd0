"""The gateways of a database: what each of them serves of every endpoint, and which of them leads.

Each gateway replaces its own row every second. One of them is the leader: it holds the lease in ``leadership``, and it
alone records the states of endpoints and removes the rows of gateways that have gone. Each change of the holder raises
the lease's ``fence``. A write of the leader carries its fence, and is refused in its own transaction if the lease has
another one by then (``check_fence``), so that a leader that was suspended or cut off changes nothing when it is back.

No wall clock decides: a lease or a gateway is silent if its ``beat`` does not change for a while, by the observer's
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..interface.canary import EntityCounts
from ..interface.errors import Conflict
from ..metering.store.store import Store
from ..metering.store.tables import gateways, leadership

ROLE = "endpoints"


AdapterProgress: TypeAlias = Literal["LOADED", "LOADING", "REFUSED"]


class AdapterReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway's report of an adapter that was loaded at run time: whether all of its workers and engines have this
    ``revision``, with this content, or why an engine refused it, or why its files could not be fetched yet."""

    revision: str
    state: AdapterProgress
    message: str = ""
    content_hash: str = ""


class EndpointReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway's report of one endpoint.

    All of its workers serve config ``version`` (None: none of its configs), whose content has the hash ``content``.
    ``ready`` says whether the engines answer. Config ``failed_version`` cannot be served here, because of ``message``.
    ``adapters`` has those that were loaded at run time, by their names; ``canary`` what the canary of the config has
    answered here, if it has one.
    """

    version: int | None = None
    content: str = ""
    ready: bool = False
    failed_version: int | None = None
    message: str = ""
    adapters: dict[str, AdapterReport] = {}
    canary: EntityCounts | None = None


Reports = Mapping[str, EndpointReport]
"""The reports of a gateway by the ids of endpoints."""


class Gateway(Struct, frozen=True, kw_only=True):
    """A gateway that lives. ``serving`` is False during its start, while it takes no requests yet. ``engines`` are
    those on joined hosts that its workers may have requests on."""

    gateway: str
    name: str
    started_ms: int
    serving: bool
    beat: int
    reports: dict[str, EndpointReport] = {}
    engines: tuple[str, ...] = ()


class Lease(Struct, frozen=True, kw_only=True):
    """The lease of the leader, as it was read. ``holder`` is a gateway, "" if nobody holds it."""

    holder: str = ""
    fence: int = 0
    beat: int = 0


class Fence(Struct, frozen=True, kw_only=True):
    """The right of one holder of the lease to write."""

    holder: str
    number: int


class NotLeader(Conflict):
    """A write of a gateway that is not the leader any more; it has changed nothing."""


_decode = msgspec.json.Decoder(dict[str, EndpointReport]).decode
_decode_engines = msgspec.json.Decoder(tuple[str, ...]).decode


def check_fence(connection: sa.Connection, fence: Fence | None) -> None:
    """Raise ``NotLeader`` unless the lease still has ``fence``, and keep it so until the transaction ends.

    None is a caller that is alone, such as a test.
    """
    if fence is None:
        return
    query = sa.select(leadership.c.holder, leadership.c.fence).where(leadership.c.role == ROLE)
    found = connection.execute(query.with_for_update(read=True)).one_or_none()
    if found is None or (found.holder, found.fence) != (fence.holder, fence.number):
        raise NotLeader("another gateway leads now")


def gateways_in(connection: sa.Connection) -> tuple[Gateway, ...]:
    """Return the gateways, sorted by name."""
    query = sa.select(gateways).order_by(gateways.c.name, gateways.c.gateway)
    return tuple(
        Gateway(
            gateway=row.gateway,
            name=row.name,
            started_ms=row.started_ms,
            serving=bool(row.serving),
            beat=row.beat,
            reports=_decode(row.report),
            engines=_decode_engines(row.engines),
        )
        for row in connection.execute(query)
    )


def leader_in(connection: sa.Connection) -> str:
    """Return the gateway that leads, "" if none does."""
    found = connection.execute(sa.select(leadership.c.holder).where(leadership.c.role == ROLE)).scalar_one_or_none()
    return found or ""


class Gateways:
    """The gateways and the lease of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> tuple[Gateway, ...]:
        """Return the gateways, sorted by name."""
        return self._store.read(gateways_in)

    def lease(self) -> Lease:
        """Return the lease as it is now."""
        query = sa.select(leadership.c.holder, leadership.c.fence, leadership.c.beat).where(leadership.c.role == ROLE)
        found = self._store.read(lambda connection: connection.execute(query).mappings().one_or_none())
        return Lease() if found is None else Lease(**found)

    def write(self, gateway: Gateway, *, fence: Fence | None, take: Lease | None) -> Fence | None:
        """Replace the row of ``gateway``; renew the lease of ``fence``, or take the one that was read as ``take``.

        Return the fence that the gateway holds now; None if another one has the lease, or if neither is given.
        """
        row = {name: getattr(gateway, name) for name in ("name", "started_ms", "serving", "beat")}
        row["report"] = msgspec.json.encode(gateway.reports).decode()
        row["engines"] = msgspec.json.encode(gateway.engines).decode()

        def work(connection: sa.Connection) -> Fence | None:
            held = self._hold(connection, gateway.gateway, fence, take)  # first: the order of the leader's own writes
            insert = self._store.insert(gateways).values(gateway=gateway.gateway, **row)
            connection.execute(insert.on_conflict_do_update(index_elements=["gateway"], set_=row))
            return held

        return self._store.write(work, timeout=2.0)

    def _hold(self, connection: sa.Connection, gateway: str, fence: Fence | None, take: Lease | None) -> Fence | None:
        if fence is None and take is None:
            return None
        this = leadership.c.role == ROLE
        if fence is not None:
            held = sa.and_(this, leadership.c.holder == fence.holder, leadership.c.fence == fence.number)
            renewed = connection.execute(sa.update(leadership).where(held).values(beat=leadership.c.beat + 1))
            if renewed.rowcount:
                return fence
        if take is None:
            return None
        new = self._store.insert(leadership).values(role=ROLE, holder="", fence=0, beat=0)
        connection.execute(new.on_conflict_do_nothing())
        columns = leadership.c
        read = sa.and_(this, columns.holder == take.holder, columns.fence == take.fence, columns.beat == take.beat)
        values = {"holder": gateway, "fence": take.fence + 1, "beat": take.beat + 1}
        if not connection.execute(sa.update(leadership).where(read).values(**values)).rowcount:
            return None
        return Fence(holder=gateway, number=take.fence + 1)

    def remove(self, silent: list[Gateway], fence: Fence | None) -> None:
        """Remove gateways that have gone, unless they have written their rows again. Raises ``NotLeader``."""

        def work(connection: sa.Connection) -> None:
            check_fence(connection, fence)
            for one in silent:
                this = sa.and_(gateways.c.gateway == one.gateway, gateways.c.beat == one.beat)
                connection.execute(sa.delete(gateways).where(this))

        self._store.write(work, timeout=2.0)

    def leave(self, gateway: str) -> None:
        """Remove the row of a gateway that ends, and give its lease to whoever asks first."""

        def work(connection: sa.Connection) -> None:
            held = sa.and_(leadership.c.role == ROLE, leadership.c.holder == gateway)
            connection.execute(sa.update(leadership).where(held).values(holder="", beat=leadership.c.beat + 1))
            connection.execute(sa.delete(gateways).where(gateways.c.gateway == gateway))

        self._store.write(work, timeout=2.0)
