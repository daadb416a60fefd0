"""Admission: the check of limits before a request is read, and the transaction that admits it.

The transaction checks limits, charges the windows and the bucket, and opens the ledger row.
"""

from __future__ import annotations

import functools

import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import Unavailable
from ..accounts import windows
from ..accounts.authorization import ANONYMOUS
from ..accounts.limits import Limit, LimitStatus, Subject, admit, rebuilt, standing, subjects_of, user_subject
from ..accounts.money import currency_of
from ..accounts.monotonic_clock import MonotonicClock
from ..accounts.windows import Amounts, WindowState
from ..store.store import Store
from ..store.tables import buckets, ledger, limits
from ..store.tables import windows as window_table
from .lease import Bucket, Reservation
from .settlement import load_windows, save_windows

RETRY_SECONDS = 30.0
"""The ``Retry-After`` of what an operator has to put right."""


class WindowsAhead(Unavailable):
    """A window lies in the future; the store itself is well."""


class WindowMissing(Exception):
    """A limit has no window yet; ``open_windows`` creates it, and the reservation starts over."""

    def __init__(self, subjects: tuple[Subject, ...]) -> None:
        super().__init__(subjects)
        self.subjects = subjects


class Admitted(Struct, frozen=True, kw_only=True):
    limits: tuple[LimitStatus, ...]
    within_reserve: bool


_insert = sa.insert(ledger)
_find_limits = sa.select(limits).where(
    sa.or_(
        *(
            sa.and_(limits.c.scope == scope, limits.c.subject == sa.bindparam(scope))
            for scope in ("endpoint", "key", "tenant", "user")
        )
    )
)


def reserve(
    connection: sa.Connection, reservation: Reservation, store: Store, *, row: dict[str, object], clock: MonotonicClock
) -> Admitted:
    """Write the open row and charge the windows. Raises ``LimitExceeded``, ``WindowMissing``, ``IntegrityError``.

    The row is inserted first: on PostgreSQL this takes the ledger's row lock, so a window that is being built is either
    seen whole below or waits for this transaction. If another process is ahead, ``clock`` moves up to the windows'
    latest second, so that windows only ever move forward.
    """
    connection.execute(_insert, row | {"charged_at": (charged := int(clock.now()))})
    found = connection.execute(
        _find_limits,
        {
            "endpoint": reservation.endpoint,
            "key": reservation.key_id,
            "tenant": reservation.tenant,
            "user": reservation.endpoint,
        },
    )
    set_limits = [Limit(scope=scope, subject=subject, kind=kind, value=value) for scope, subject, kind, value in found]
    states = load_windows(connection, row)
    checked = _pair(set_limits, states, row)
    _move_up(clock, states)
    now, taken = int(clock.now()), 0
    if states:
        wanted = _wanted(reservation, row)
        currency = functools.partial(currency_of, connection)
        admit(checked, now, wanted, currency, is_shared=is_shared(reservation.key_id))
        _charge(connection, states, wanted, now)
    if reservation.bucket is not None:
        taken = _take(connection, store, reservation, reservation.bucket, clock)
    if now != charged or taken:
        own = ledger.c.request_id == reservation.request_id
        connection.execute(sa.update(ledger).where(own).values(charged_at=now, bucket_milli=taken))
    limits_told = standing(checked, now, is_shared=is_shared(reservation.key_id))
    return Admitted(limits=limits_told, within_reserve=reservation.bucket is None or taken > 0)


def _move_up(clock: MonotonicClock, states: dict[Subject, WindowState]) -> None:
    """Move ``clock`` up to the latest second of the windows. Raises ``WindowsAhead``."""
    for (scope, subject), state in states.items():
        if clock.is_beyond(state.latest):
            ahead, name = state.latest - clock.now(), subject.replace("\n", " ")
            raise WindowsAhead(
                f"the limits of {scope} {name} are {ahead:.0f} s ahead of the database's clock: a server whose clock "
                "was wrong has moved them; 'mlflow-llm windows repair' puts them right",
                retry_after=RETRY_SECONDS,
            )
        clock.move_up_to(state.latest)


def is_shared(key_id: str) -> bool:
    """Return whether the caller with this key shares its endpoints with others."""
    return key_id != ANONYMOUS.key_id


def _wanted(reservation: Reservation, row: dict[str, object]) -> Amounts:
    return Amounts(
        input=reservation.input_tokens,
        output=reservation.max_output_tokens,
        queries=1,
        in_flight=1,
        money=int(str(row["reserved_cost"])),
    )


def _charge(connection: sa.Connection, states: dict[Subject, WindowState], wanted: Amounts, now: int) -> None:
    for state in states.values():
        windows.charge(state, now, wanted)
    save_windows(connection, states)


def _pair(
    set_limits: list[Limit], states: dict[Subject, WindowState], row: dict[str, object]
) -> list[tuple[Limit, WindowState]]:
    subjects = dict(subjects_of(row))  # type: ignore[arg-type]
    missing = {(limit.scope, subjects[limit.scope]) for limit in set_limits} - set(states)
    if missing:
        raise WindowMissing(tuple(sorted(missing)))
    return [(limit, states[limit.scope, subjects[limit.scope]]) for limit in set_limits]


def open_windows(connection: sa.Connection, store: Store, subjects: tuple[Subject, ...]) -> None:
    """Build windows from the ledger while nothing else writes to it."""
    store.lock_ledger(connection)
    for scope, subject in subjects:
        state = windows.encode(rebuilt(connection, (scope, subject)))
        insert = store.insert(window_table).values(scope=scope, subject=subject, state=state)
        connection.execute(insert.on_conflict_do_nothing())


def _take(
    connection: sa.Connection, store: Store, reservation: Reservation, bucket: Bucket, clock: MonotonicClock
) -> int:
    """Take the reservation from the token bucket of provisioned throughput; return the thousandths of tokens taken.

    It takes all or nothing (0). The bucket refills at ``rate`` and holds ``rate × burst_seconds``; over any T seconds
    at most ``rate × (T + burst_seconds)`` tokens are provisioned. A request larger than the bucket needs a full bucket.
    """
    subject, now_ms = f"{reservation.endpoint}\n{reservation.entity}", int(clock.now() * 1000)
    capacity = bucket.rate * bucket.burst_seconds * 1000
    wanted = reservation.max_output_tokens * 1000 + reservation.input_tokens * bucket.prompt_weight_milli
    of_subject = buckets.c.subject == subject
    new = store.insert(buckets).values(subject=subject, level_milli=capacity, at_ms=now_ms)
    connection.execute(new.on_conflict_do_nothing())
    level, at_ms = connection.execute(
        sa.select(buckets.c.level_milli, buckets.c.at_ms).where(of_subject).with_for_update()
    ).one()
    clock.move_up_to(at_ms / 1000)
    level = min(capacity, level + max(0, now_ms - at_ms) * bucket.rate)
    taken = wanted if level >= min(wanted, capacity) else 0
    update = sa.update(buckets).where(of_subject)
    connection.execute(update.values(level_milli=level - taken, at_ms=max(now_ms, at_ms)))
    return taken


def check(
    connection: sa.Connection, *, key_id: str, tenant: str, endpoint: str | None, least: Amounts, clock: MonotonicClock
) -> None:
    """Raise ``LimitExceeded`` or ``PermissionDenied`` if a request of the ``least`` amounts would be refused.

    This is asked before a request is read, so that no body of megabytes is received and tokenised in vain. It reserves
    nothing; ``reserve`` decides.
    ``endpoint`` is None if it is not known yet; its limits are then not checked.
    """
    of_limits: dict[str, Subject] = {"key": ("key", key_id), "tenant": ("tenant", tenant)}
    if endpoint is not None:
        of_limits |= {"endpoint": ("endpoint", endpoint), "user": ("user", user_subject(endpoint, key_id))}
    named = {scope: (endpoint or "") if scope == "user" else subject[1] for scope, subject in of_limits.items()}
    found = connection.execute(sa.select(limits).where(_any(limits, named)))
    set_limits = [Limit(scope=scope, subject=subject, kind=kind, value=value) for scope, subject, kind, value in found]
    if not set_limits:
        return
    rows = connection.execute(sa.select(window_table).where(_any(window_table, dict(of_limits.values()))))
    states = {(scope, subject): windows.decode(state) for scope, subject, state in rows}
    _move_up(clock, states)
    paired = [(limit, states.get(of_limits[limit.scope], WindowState())) for limit in set_limits]
    shared = is_shared(key_id)
    admit(paired, int(clock.now()), least, functools.partial(currency_of, connection), is_shared=shared)


def _any(table: sa.Table, subjects: dict[str, str]) -> sa.ColumnElement[bool]:
    return sa.or_(*(sa.and_(table.c.scope == scope, table.c.subject == name) for scope, name in subjects.items()))
