"""Alerts of limits: an event for webhooks when a share of a limit is used, once for each window of the limit.

Nothing of this is in the way of requests: the leader of the gateways looks at the windows that admissions keep.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from ..store.outbox import EventOutbox
from ..store.store import Store
from ..store.tables import budget_alerts, limits
from ..store.tables import windows as window_table
from . import windows
from .limits import END_USER_SCOPES, Limit, Scope, in_force
from .money import currency_of, units
from .windows import BUDGETS, RATES, Kind, WindowState

logger = logging.getLogger(__name__)

EVENT = "budget.alert"
LOOK_SECONDS = 15.0


class Due(Struct, frozen=True, kw_only=True):
    """A share of a limit that is used, and that nobody was told of in this period. ``subject`` is the window's."""

    limit: Limit
    subject: str
    period: int
    share: float
    used: int

    @property
    def key(self) -> dict[str, Any]:
        """The columns by which an alert is known."""
        named = {"scope": self.limit.scope, "subject": self.subject, "kind": self.limit.kind, "period": self.period}
        return named | {"value": self.limit.value, "share_milli": round(self.share * 1000)}


class BudgetAlerts:
    """The alerts of a store's limits: at their own shares, or at ``shares`` (0.5 is half) for budgets without.

    ``clock`` returns Unix seconds.
    """

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
        self._has_warned = False

    def tick(self, leads: bool) -> None:
        """Look at the limits if it is time and this gateway ``leads``. Raises ``Unavailable``."""
        if not leads or self._monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._monotonic()
        if not self._outbox.has_webhooks:
            self._warn()
        elif due := self._store.read(self._due):
            self._store.write(lambda connection: self._alert(connection, due))

    def _warn(self) -> None:
        """Log once that limits have alerts of which nobody is told."""
        if not self._has_warned and any(limit.alert_at for limit in self._store.read(_set_limits)):
            logger.warning("limits have alert_at, and nobody is told: --webhook-urls names webhooks")
            self._has_warned = True

    def _due(self, connection: sa.Connection) -> list[Due]:
        """Return the shares that are used, and that nobody was told of yet."""
        by_owner: dict[tuple[Scope, str], list[Limit]] = {}
        for limit in _set_limits(connection):
            by_owner.setdefault((limit.scope, limit.subject), []).append(limit)
        watched = {
            owner: found for owner, found in by_owner.items() if any(alert_shares(one, self._shares) for one in found)
        }
        if not watched:
            return []
        now = int(self._clock())
        told: dict[tuple[object, ...], int] = {}
        for *key, at_ms in connection.execute(
            sa.select(*(budget_alerts.c[name] for name in KEY), budget_alerts.c.at_ms)
        ):
            for known in (tuple(key), (*key[:3], None, *key[4:])):  # of its period, and of any
                told[known] = max(told.get(known, 0), at_ms)
        found = []
        for limit, subject, state in _counted(connection, watched):
            used, period = windows.used(state, limit.kind, now), period_of(limit.kind, now)
            for share in alert_shares(limit, self._shares):
                due = Due(limit=limit, subject=subject, period=period, share=share, used=used)
                if used * 1000 >= limit.value * round(share * 1000) and not _is_told(due, told, now):
                    found.append(due)
        return found

    def _alert(self, connection: sa.Connection, due: list[Due]) -> None:
        currency, now_ms = currency_of(connection), int(self._clock() * 1000)
        for one in due:
            new = self._store.insert(budget_alerts).values(**one.key, at_ms=now_ms).on_conflict_do_nothing()
            if connection.execute(new, execution_options={"preserve_rowcount": True}).rowcount != 1:
                continue  # the leader before this one was faster
            self._outbox.put(connection, EVENT, _event(one, currency))
        table = budget_alerts.c
        ended = sa.or_(
            sa.and_(table.kind.in_(RATES), table.at_ms < now_ms - KEPT_RATE_SECONDS * 1000),
            # a budget without periods is told of once
            sa.and_(table.kind != "budget", table.at_ms < now_ms - KEPT_SECONDS * 1000),
        )
        connection.execute(sa.delete(budget_alerts).where(ended))


def alert_shares(limit: Limit, of_server: tuple[float, ...]) -> tuple[float, ...]:
    """Return the shares of a limit at which webhooks are told: its own, or those of the server for a budget without; of
    a soft limit, always when all of it is used."""
    shares = limit.alert_at
    if shares is None:
        by_server = limit.kind in BUDGETS and limit.scope not in END_USER_SCOPES
        shares = of_server if by_server else ()
    return tuple(sorted({*shares, 1.0})) if limit.soft else shares


KEY = ("scope", "subject", "kind", "period", "value", "share_milli")
KEPT_SECONDS = 40 * windows.DAY_SECONDS  # longer than any period of a budget
KEPT_RATE_SECONDS = 2 * 3600  # longer than any window of a rate


def _set_limits(connection: sa.Connection) -> list[Limit]:
    """Return the limits whose use is counted in windows."""
    query = sa.select(limits).where(limits.c.kind != "in_flight")
    return [Limit.of_row(*row) for row in connection.execute(query)]


def _counted(
    connection: sa.Connection, by_owner: dict[tuple[Scope, str], list[Limit]]
) -> Iterator[tuple[Limit, str, WindowState]]:
    """Yield each limit above 0 with the windows that count towards it: of users and end users, one for each."""
    table = window_table.c
    query = sa.select(table.scope, table.subject, table.state).where(table.scope.in_({scope for scope, _ in by_owner}))
    for scope, subject, state in connection.execute(query):
        owner, _, user = subject.partition("\n")
        end_user = _end_user(scope, user)
        of_owner = [one for one in by_owner.get((scope, owner), ()) if one.end_user in ("", end_user)]
        for limit in in_force(of_owner):
            if limit.value:
                yield limit, subject, windows.decode(state)


def _end_user(scope: Scope, user: str) -> str:
    """Return the end user in what follows the owner in a window's subject."""
    if scope not in END_USER_SCOPES:
        return ""
    return user.partition("\n")[2] if scope == "endpoint_user" else user


def _is_told(due: Due, told: dict[tuple[object, ...], int], now: int) -> bool:
    key = due.key
    if (seconds := windows.window_seconds(due.limit.kind)) is None:
        return tuple(key.values()) in told
    # the window of a rate has no fixed begin: the same use may be in it before and after a full minute
    return told.get(tuple((key | {"period": None}).values()), 0) > (now - seconds) * 1000


def _event(due: Due, currency: str) -> dict[str, Any]:
    limit = due.limit
    subject, _, user = due.subject.partition("\n")
    data: dict[str, Any] = {"scope": limit.scope, "subject": subject, "kind": limit.kind}
    if limit.scope == "user":
        data["key_id"] = user
    if limit.scope in END_USER_SCOPES:
        data["end_user"] = _end_user(limit.scope, user)
    if limit.scope == "endpoint_user":
        data["tenant"] = user.partition("\n")[0]
    data |= {"share": due.share, "soft": limit.soft}
    if limit.kind in BUDGETS:
        return data | {"used": units(due.used), "budget": units(limit.value), "currency": currency}
    return data | {"used": due.used, "limit": limit.value, "unit": windows.UNITS[limit.kind]}


def period_of(kind: Kind, second: int) -> int:
    """Return the number of the window's length, day or month (UTC) that a second is in; 0 for a budget without
    periods."""
    if seconds := windows.window_seconds(kind):
        return second // seconds
    if kind == "budget_day":
        return second // windows.DAY_SECONDS
    return windows.month_of(second) if kind == "budget_month" else 0
