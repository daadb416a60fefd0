"""Repair what a server with a wrong clock has moved: times in the future, and the windows that count by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.audit import Actor, record
from ..accounts.limits import END_USER_SCOPES, rebuilt
from ..proof.chain import link_repaired, lock
from ..store.store import Store
from ..store.tables import buckets, ledger, new_epoch, provisioned_minutes
from ..store.tables import windows as window_table
from .store_clock import StoreClock


class Repaired(Struct, frozen=True, kw_only=True):
    """The numbers of ledger rows and provisioned minutes whose times were in the future, and of windows that changed;
    ``shift`` is the number of seconds that the times were moved back by."""

    rows: int
    minutes: int
    windows: int
    shift: int


def repair(
    store: Store, *, shift: int | None = None, wall: Callable[[], float] = time.time, by: Actor | None = None
) -> Repaired:
    """Move times in the future back by ``shift`` seconds, and rebuild every window from the ledger.

    None moves them back so far that the latest is now: what was used while the clock was wrong counts as used just now,
    never as unused. Times that ``shift`` leaves in the future become now. On SQLite, ``wall`` becomes the time of the
    store.
    """
    clock = StoreClock(store, 0.0, wall=wall)
    if not store.has_clock:
        clock.set(wall())
    now = int(clock.read().store)

    def work(connection: sa.Connection) -> Repaired:
        lock(store, connection)
        store.lock_ledger(connection)
        latest = _latest(connection)
        back = max(latest - now, 0) if shift is None else shift
        rows = _move_rows(connection, store, now, back)
        minutes = _move_minutes(connection, now, back)
        connection.execute(sa.update(buckets).where(buckets.c.at_ms > now * 1000).values(at_ms=now * 1000))
        done = Repaired(rows=rows, minutes=minutes, windows=_rebuild(connection), shift=back)
        record(connection, by, "windows.repair", "windows", after={"shift": back, "rows": rows, "minutes": minutes})
        return done

    return store.write(work, timeout=60.0)


def _latest(connection: sa.Connection) -> int:
    charged = connection.execute(sa.select(sa.func.max(ledger.c.charged_at))).scalar_one()
    minute = connection.execute(sa.select(sa.func.max(provisioned_minutes.c.minute))).scalar_one()
    return max(charged or 0, (minute or 0) * 60)


def _earlier(column: sa.ColumnElement[Any], now: int, back: int) -> sa.ColumnElement[Any]:
    moved = column - back
    return sa.case((moved > now, now), else_=moved)


def _move_rows(connection: sa.Connection, store: Store, now: int, back: int) -> int:
    table = ledger.c
    linked = sa.select(table.request_id).where(table.charged_at > now, table.chained.is_not(None))
    changed = connection.execute(linked).scalars().all()
    future = sa.update(ledger).where(table.charged_at > now)
    moved = connection.execute(
        future.values(
            charged_at=_earlier(table.charged_at, now, back),
            started_ms=_earlier(table.started_ms, now * 1000, back * 1000),
            ended_ms=_earlier(table.ended_ms, now * 1000, back * 1000),
        )
    ).rowcount
    link_repaired(connection, store, changed, now * 1000)
    return moved


def _move_minutes(connection: sa.Connection, now: int, back: int) -> int:
    """Move reserved minutes; one that another server has billed at its right time already is removed."""
    table, moved = provisioned_minutes.c, 0
    found = connection.execute(
        sa.select(table.endpoint, table.entity, table.minute).where(table.minute > now // 60).order_by(table.minute)
    )
    for endpoint, entity, minute in found.all():
        target = min(minute - -(-back // 60), now // 60)
        this = sa.and_(table.endpoint == endpoint, table.entity == entity)
        taken = connection.execute(sa.select(table.minute).where(this, table.minute == target)).first()
        future = sa.and_(this, table.minute == minute)
        change = sa.update(provisioned_minutes).where(future).values(minute=target)
        connection.execute(change if taken is None else sa.delete(provisioned_minutes).where(future))
        moved += 1
    return moved


def _rebuild(connection: sa.Connection) -> int:
    changed = 0
    rows = sa.select(window_table.c.scope, window_table.c.subject, window_table.c.state)
    for scope, subject, stored in connection.execute(rows).all():
        window = rebuilt(connection, (scope, subject))
        if (state := windows.encode(window)) != stored:
            this = sa.and_(window_table.c.scope == scope, window_table.c.subject == subject)
            used_at = window.latest if scope in END_USER_SCOPES else None
            connection.execute(
                sa.update(window_table).where(this).values(state=state, used_at=used_at, epoch=new_epoch())
            )
            changed += 1
    return changed
