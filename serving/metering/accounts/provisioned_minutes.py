"""Billing of provisioned throughput: units are billed by the minute, whether they were used or not."""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from ..store.store import Store
from ..store.tables import provisioned_minutes
from ..store.tables import windows as window_table
from . import windows
from .prices import Prices
from .windows import Amounts


class ProvisionedMinutes:
    """The billing of provisioned minutes. One unit is one token/s.

    Any number of processes may call ``record`` any number of times: a minute is billed once, for the most units that
    were provisioned in it.
    """

    def __init__(self, store: Store, *, prices: Prices | None = None, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._prices = prices or Prices(store, clock=clock)
        self._clock = clock

    def record(self, *, tenant: str, endpoint: str, entity: str, units: int, asked: str = "") -> int:
        """Bill the current minute for ``units`` and return the micro-units added, 0 if it was billed already.

        ``asked`` is what a command line asked for, by which the price may be set too. An earlier release has billed the
        entity by that name, perhaps this minute.
        """
        now = self._clock()
        minute, price = int(now) // 60, self._prices.at((entity, asked, endpoint), now).unit_minute
        row = {"endpoint": endpoint, "entity": entity, "minute": minute, "tenant": tenant}

        def work(connection: sa.Connection) -> int:
            self._store.lock_ledger(connection)  # since windows are rebuilt from minutes too
            if asked and units <= _units(connection, endpoint, asked, minute):
                return 0
            blank = self._store.insert(provisioned_minutes).values(**row, units=0, unit_price=price, cost=0)
            connection.execute(blank.on_conflict_do_nothing())
            table = provisioned_minutes.c
            this = sa.and_(table.endpoint == endpoint, table.entity == entity, table.minute == minute)
            query = sa.select(table.units, table.unit_price, table.cost, table.tenant).where(this).with_for_update()
            had, held_price, cost, billed = connection.execute(query).one()
            if units <= had:
                return 0
            added = units * held_price - cost
            connection.execute(sa.update(provisioned_minutes).where(this).values(units=units, cost=units * held_price))
            for subject in (("endpoint", endpoint), ("tenant", billed)):
                _spend(connection, subject, minute * 60, added)
            return int(added)

        return self._store.write(work)


def _units(connection: sa.Connection, endpoint: str, entity: str, minute: int) -> int:
    """Return the units of an entity that are billed for a minute; 0 for none."""
    table = provisioned_minutes.c
    this = sa.and_(table.endpoint == endpoint, table.entity == entity, table.minute == minute)
    return connection.execute(sa.select(table.units).where(this)).scalar_one_or_none() or 0


def _spend(connection: sa.Connection, subject: tuple[str, str], at: int, money: int) -> None:
    this = sa.and_(window_table.c.scope == subject[0], window_table.c.subject == subject[1])
    stored = connection.execute(sa.select(window_table.c.state).where(this).with_for_update()).scalar_one_or_none()
    if stored is not None:
        state = windows.decode(stored)
        windows.charge(state, at, Amounts(money=money))
        connection.execute(sa.update(window_table).where(this).values(state=windows.encode(state)))
