"""The audit log: changes of endpoints, keys, limits and prices with their authors, written in the same transaction.

The database itself (by triggers, see the migrations) refuses to change rows of the log, and to delete them except by
age; the entry that records such a deletion stays. Secrets and their hashes are never in it.
"""

from __future__ import annotations

import getpass
import time
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import InvalidField
from ..store.cursors import number_of
from ..store.store import Store
from ..store.tables import audit

MAX_PAGE = 1000
ACTIONS = (
    "endpoint.create",
    "endpoint.update_config",
    "endpoint.rate_limits",
    "endpoint.tags",
    "endpoint.load_adapter",
    "endpoint.unload_adapter",
    "endpoint.delete",
    "endpoint.delete_payloads",
    "key.create",
    "key.update",
    "key.rotate",
    "key.revoke",
    "limit.set",
    "limit.delete",
    "price.set",
    "price.delete",
    "currency.set",
    "windows.repair",
    "audit.prune",
)
MIN_DAYS = 90
"""The database keeps entries for so long, whoever asks (migration 0005)."""
MAX_DAYS = 36_500
DAY_MS = 86_400_000
BATCH_ROWS = 2000  # entries per transaction
Via = Literal["http", "command", "python", "server"]


class Actor(Struct, frozen=True, kw_only=True):
    """The author of a change: the id of a key or token, or a user of the machine; with ``request_id`` if by HTTP."""

    name: str
    via: Via
    tenant: str | None = None
    request_id: str | None = None


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One change. ``before`` and ``after`` are the state of its object, None if it did not or does not exist."""

    id: int
    at_ms: int
    actor: str
    tenant: str | None
    via: str
    request_id: str | None
    action: str
    target: str
    before: Any
    after: Any


class AuditFilter(Struct, frozen=True, kw_only=True):
    """Entries within [start_ms, end_ms) that match the other fields; None matches all."""

    start_ms: int = 0
    end_ms: int | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None


def here(via: Via = "python") -> Actor:
    """Return the author of changes by this process: its user."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        name = "unknown"
    return Actor(name=name[:128], via=via)


def record(
    connection: sa.Connection, by: Actor | None, action: str, target: str, *, before: Any = None, after: Any = None
) -> None:
    """Add an entry in the transaction of the change. A ``by`` of None is this process's user."""
    assert action in ACTIONS, action
    by = by or here()
    row = {"at_ms": int(time.time() * 1000), "actor": by.name, "tenant": by.tenant, "via": by.via}
    row |= {"request_id": by.request_id, "action": action, "target": target}
    connection.execute(sa.insert(audit).values(**row, before=_encoded(before), after=_encoded(after)))


def _encoded(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value, order="sorted").decode()


class Audit:
    """The audit log of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def page(
        self, what: AuditFilter, *, limit: int = 100, cursor: str | None = None
    ) -> tuple[tuple[AuditEntry, ...], str | None]:
        """Return a page of entries, newest first, and the cursor of the next page. Raises ``InvalidField``."""
        query = sa.select(audit).where(audit.c.at_ms >= what.start_ms)
        if what.end_ms is not None:
            query = query.where(audit.c.at_ms < what.end_ms)
        for name in ("actor", "action", "target"):
            if getattr(what, name) is not None:
                query = query.where(audit.c[name] == getattr(what, name))
        if cursor is not None:
            query = query.where(audit.c.id < number_of(cursor))
        query = query.order_by(audit.c.id.desc()).limit(limit + 1)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        entries = tuple(_entry(row) for row in rows[:limit])
        return entries, str(entries[-1].id) if len(rows) > limit else None


def prune(store: Store, days: int, *, by: Actor | None = None) -> int:
    """Remove every entry that is more than ``days`` days old, and return how many.

    The removal is itself an entry, which says what was removed and by whom. It may be interrupted and repeated at any
    time, and run beside a server. Raises ``InvalidField``.
    """
    if not isinstance(days, int) or isinstance(days, bool) or not MIN_DAYS <= days <= MAX_DAYS:
        raise InvalidField("days", days, f"an integer from {MIN_DAYS} to {MAX_DAYS}")
    before = int(time.time() * 1000) - days * DAY_MS
    old = audit.c.at_ms < before

    def announce(connection: sa.Connection) -> int:
        count = connection.execute(sa.select(sa.func.count()).select_from(audit).where(old)).scalar_one()
        if count:
            record(connection, by, "audit.prune", str(days), after={"before_ms": before, "entries": count})
        return count

    left = total = store.write(announce)
    batch = sa.select(audit.c.id).where(old).order_by(audit.c.at_ms).limit(BATCH_ROWS)
    while left > 0:
        gone = store.write(
            lambda connection: connection.execute(sa.delete(audit).where(audit.c.id.in_(batch))).rowcount
        )
        left = left - gone if gone else 0
    return total


def _entry(row: sa.Row) -> AuditEntry:
    fields = dict(row._mapping)
    for name in ("before", "after"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    return AuditEntry(**fields)
