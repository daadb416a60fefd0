"""Compute what is left of each limit that a caller's requests would count against, without making a request."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.authorization import Caller
from ..accounts.limits import END_USER_SCOPES, Limit, Scope, Subject, in_force, rebuilt, user_subject
from ..accounts.monotonic_clock import MonotonicClock
from ..store.tables import limits
from ..store.tables import windows as window_table
from .admission import WindowMissing
from .slices import is_shared


class LimitLeft(Struct, frozen=True, kw_only=True):
    """A limit, what is used and what is left of it. ``reset_after`` is the seconds until all of it is free again, None
    for a budget that never is; ``endpoint`` is "" for limits of the key and its tenant, ``end_user`` is "" for all but
    those of end users. Of a soft limit, more than its value may be ``used``."""

    limit: Limit
    endpoint: str
    end_user: str
    used: int
    remaining: int
    reset_after: int | None


def limits_left(
    connection: sa.Connection, caller: Caller, endpoints: Iterable[str], clock: MonotonicClock, *, end_user: str = ""
) -> tuple[LimitLeft, ...]:
    """Return the limits on ``caller`` at ``endpoints``, and those on its ``end_user`` there if one is named. Raises
    ``WindowMissing``.

    A limit of an endpoint that others use too is left out: the others' usage could be inferred from what is left.
    """
    names = tuple(endpoints)
    found = _of_caller(connection, caller, names)
    if end_user:
        found += _of_end_user(connection, caller, names, end_user)
    states = {window: _state(connection, window) for window in dict.fromkeys(window for _, window, _ in found)}
    missing = tuple(window for window, state in states.items() if state is None)
    if missing:
        raise WindowMissing(missing)
    now = max([int(clock.now()), *(state.latest for state in states.values() if state is not None)])
    return tuple(_left(endpoint, limit, states[window], now, end_user) for endpoint, window, limit in found)


def _of_caller(
    connection: sa.Connection, caller: Caller, endpoints: tuple[str, ...]
) -> list[tuple[str, Subject, Limit]]:
    """Return the limits of a caller, each behind its endpoint ("" if it is of none) and its window."""
    own: list[tuple[str, tuple[Scope, str], Subject]] = [
        ("", ("key", caller.key_id), ("key", caller.key_id)),
        ("", ("tenant", caller.tenant), ("tenant", caller.tenant)),
    ]
    for name in endpoints:
        own.append((name, ("user", name), ("user", user_subject(name, caller.key_id))))
        if not is_shared(caller.key_id):
            own.append((name, ("endpoint", name), ("endpoint", name)))
    return [(endpoint, window, limit) for endpoint, set_on, window in own for limit in _set_on(connection, set_on)]


def _of_end_user(
    connection: sa.Connection, caller: Caller, endpoints: tuple[str, ...], end_user: str
) -> list[tuple[str, Subject, Limit]]:
    """Return limits of an end user that ``caller`` names, as ``_of_caller`` does: its own, or else those of each."""
    counted = user_subject(caller.tenant, end_user)
    own: list[tuple[str, Scope, str, str]] = [
        ("", "key_user", caller.key_id, user_subject(caller.key_id, end_user)),
        ("", "tenant_user", caller.tenant, counted),
        *((name, "endpoint_user", name, user_subject(name, counted)) for name in endpoints),
    ]
    found: list[tuple[str, Subject, Limit]] = []
    for endpoint, scope, owner, window in own:
        both = _set_on(connection, (scope, owner)) + _set_on(connection, (scope, user_subject(owner, end_user)))
        found += [(endpoint, (scope, window), limit) for limit in in_force(both)]
    return found


def _set_on(connection: sa.Connection, subject: tuple[Scope, str]) -> list[Limit]:
    this = sa.and_(limits.c.scope == subject[0], limits.c.subject == subject[1])
    return [Limit.of_row(*row) for row in connection.execute(sa.select(limits).where(this).order_by(limits.c.kind))]


def _state(connection: sa.Connection, window: Subject) -> windows.WindowState | None:
    """Return a window; None if it has to be built. That of an end user is computed and not stored: names of end users
    are whatever a caller asks for."""
    table = window_table.c
    query = sa.select(table.state).where(table.scope == window[0], table.subject == window[1])
    stored = connection.execute(query).scalar_one_or_none()
    if stored is None:
        return rebuilt(connection, window) if window[0] in END_USER_SCOPES else None
    return windows.decode(stored)


def _left(endpoint: str, limit: Limit, state: windows.WindowState | None, now: int, end_user: str) -> LimitLeft:
    assert state is not None  # ``WindowMissing`` was raised
    used = windows.used(state, limit.kind, now)
    at = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=limit.value)
    return LimitLeft(
        limit=limit,
        endpoint=endpoint,
        end_user=end_user if limit.scope in END_USER_SCOPES else "",
        used=used,
        remaining=max(0, limit.value - used),
        reset_after=None if at is None else max(0, at - now),
    )
