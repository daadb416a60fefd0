"""Compute what is left of each limit that a caller's requests would count against, without making a request."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.authorization import Caller
from ..accounts.limits import Limit, Scope, Subject, user_subject
from ..accounts.monotonic_clock import MonotonicClock
from ..store.tables import limits
from ..store.tables import windows as window_table
from .admission import WindowMissing
from .slices import is_shared


class LimitLeft(Struct, frozen=True, kw_only=True):
    """A limit, what is used and what is left of it. ``reset_after`` is the seconds until all of it is free again, None
    for a budget that never is; ``endpoint`` is "" for limits of the key and its tenant. ``soft`` limits refuse nothing,
    so that more than ``allowed`` may be ``used``."""

    scope: Scope
    endpoint: str
    kind: windows.Kind
    allowed: int
    used: int
    remaining: int
    reset_after: int | None
    soft: bool


def limits_left(
    connection: sa.Connection, caller: Caller, endpoints: Iterable[str], clock: MonotonicClock
) -> tuple[LimitLeft, ...]:
    """Return the limits on ``caller`` at ``endpoints``. Raises ``WindowMissing``.

    A limit of an endpoint that others use too is left out: the others' usage could be inferred from what is left.
    """
    own: list[tuple[str, Subject, Subject]] = [
        ("", ("key", caller.key_id), ("key", caller.key_id)),
        ("", ("tenant", caller.tenant), ("tenant", caller.tenant)),
    ]
    for name in endpoints:
        own.append((name, ("user", name), ("user", user_subject(name, caller.key_id))))
        if not is_shared(caller.key_id):
            own.append((name, ("endpoint", name), ("endpoint", name)))
    found = []
    for endpoint, (scope, subject), window in own:
        query = sa.select(limits).where(limits.c.scope == scope, limits.c.subject == subject).order_by(limits.c.kind)
        found += [(endpoint, window, Limit.of_row(*row)) for row in connection.execute(query)]
    states = {window: _state(connection, window) for window in dict.fromkeys(window for _, window, _ in found)}
    missing = tuple(window for window, state in states.items() if state is None)
    if missing:
        raise WindowMissing(missing)
    now = max([int(clock.now()), *(state.latest for state in states.values() if state is not None)])
    return tuple(_left(endpoint, limit, states[window], now) for endpoint, window, limit in found)


def _state(connection: sa.Connection, window: Subject) -> windows.WindowState | None:
    table = window_table.c
    query = sa.select(table.state).where(table.scope == window[0], table.subject == window[1])
    stored = connection.execute(query).scalar_one_or_none()
    return None if stored is None else windows.decode(stored)


def _left(endpoint: str, limit: Limit, state: windows.WindowState | None, now: int) -> LimitLeft:
    assert state is not None  # ``WindowMissing`` was raised
    used = windows.used(state, limit.kind, now)
    at = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=limit.value)
    return LimitLeft(
        scope=limit.scope,
        endpoint=endpoint,
        kind=limit.kind,
        allowed=limit.value,
        used=used,
        remaining=max(0, limit.value - used),
        soft=limit.soft,
        reset_after=None if at is None else max(0, at - now),
    )
