"""Alerts of budgets: an event for webhooks when a share of a budget is used, once for each period of the budget.

Nothing of this is in the way of requests: the leader of the gateways looks at the windows that admissions keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from ..store.outbox import EventOutbox
from ..store.store import Store
from ..store.tables import budget_alerts, limits
from ..store.tables import windows as window_table
from . import windows
from .money import currency_of, units
from .windows import BUDGETS, Kind, WindowState

EVENT = "budget.alert"
LOOK_SECONDS = 15.0


class BudgetAlerts:
    """The alerts of a store's budgets at ``shares`` (0.5 is half of a budget); ``clock`` returns Unix seconds."""

    def __init__(
        self,
        store: Store,
        outbox: EventOutbox,
        shares: tuple[float, ...],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._outbox, self._shares = store, outbox, tuple(sorted(shares))
        self._clock, self._monotonic = clock, monotonic
        self._looked_at = -LOOK_SECONDS

    def tick(self, leads: bool) -> None:
        """Look at the budgets if it is time and this gateway ``leads``. Raises ``Unavailable``."""
        if leads and self._shares and self._monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._monotonic()
            if due := self._store.read(self._due):
                self._store.write(lambda connection: self._alert(connection, due))

    def _due(self, connection: sa.Connection) -> list[dict[str, object]]:
        """Return the rows of shares that are used, and that nobody was told of yet."""
        now = int(self._clock())
        told = {tuple(row) for row in connection.execute(sa.select(*(budget_alerts.c[name] for name in KEY)))}
        found = []
        for scope, subject, kind, value, state in self._budgets(connection):
            have = windows.used(state, kind, now)
            for share in self._shares:
                row = {"scope": scope, "subject": subject, "kind": kind, "period": period_of(kind, now)}
                row |= {"value": value, "share_milli": round(share * 1000)}
                if have * 1000 >= value * round(share * 1000) and tuple(row.values()) not in told:
                    found.append(row | {"used": have, "at_ms": now * 1000})
        return found

    @staticmethod
    def _budgets(connection: sa.Connection) -> Iterator[tuple[str, str, Kind, int, WindowState]]:
        """Yield each budget above 0 with the window that counts towards it; a user's is that of each key."""
        query = sa.select(limits).where(limits.c.kind.in_(BUDGETS), limits.c.value > 0)
        by_subject: dict[tuple[str, str], list[sa.Row]] = {}
        for row in connection.execute(query):
            by_subject.setdefault((row.scope, row.subject), []).append(row)
        if not by_subject:
            return
        scopes = {scope for scope, _ in by_subject}
        for row in connection.execute(sa.select(window_table).where(window_table.c.scope.in_(scopes))):
            name = row.subject.partition("\n")[0] if row.scope == "user" else row.subject
            for limit in by_subject.get((row.scope, name), ()):
                yield row.scope, row.subject, limit.kind, limit.value, windows.decode(row.state)

    def _alert(self, connection: sa.Connection, due: list[dict[str, object]]) -> None:
        currency = currency_of(connection)
        for row in due:
            values = {name: value for name, value in row.items() if name != "used"}
            new = self._store.insert(budget_alerts).values(**values).on_conflict_do_nothing()
            if connection.execute(new, execution_options={"preserve_rowcount": True}).rowcount != 1:
                continue  # the leader before this one was faster
            subject, _, key = str(row["subject"]).partition("\n")
            data = {"scope": row["scope"], "subject": subject, "kind": row["kind"]} | ({"key_id": key} if key else {})
            amounts = {"used": units(int(str(row["used"]))), "budget": units(int(str(row["value"])))}
            share = int(str(row["share_milli"])) / 1000
            self._outbox.put(connection, EVENT, data | amounts | {"currency": currency, "share": share})
        old = budget_alerts.c.at_ms < int((self._clock() - KEPT_SECONDS) * 1000)
        ended = sa.and_(old, budget_alerts.c.kind != "budget")  # a budget without periods is told of once
        connection.execute(sa.delete(budget_alerts).where(ended))


KEY = ("scope", "subject", "kind", "period", "value", "share_milli")
KEPT_SECONDS = 40 * windows.DAY_SECONDS  # longer than any period


def period_of(kind: Kind, second: int) -> int:
    """Return the number of the day or month (UTC) that a budget counts in; 0 for one without periods."""
    if kind == "budget_day":
        return second // windows.DAY_SECONDS
    return windows.month_of(second) if kind == "budget_month" else 0
