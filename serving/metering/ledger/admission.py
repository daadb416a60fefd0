"""Admission: the check of limits before a request is read, and the transaction that admits it.

The transaction checks limits, charges the windows and the buckets, and opens ledger rows, for all reservations that
arrive while the one before it runs (``store.group_commit``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from ...interface.errors import LimitExceeded, PermissionDenied, RequestError, Unavailable
from ..accounts import windows
from ..accounts.limits import (
    END_USER_SCOPES,
    Limit,
    LimitStatus,
    Subject,
    admit,
    in_force,
    rebuilt,
    standing,
    subjects_of,
    user_subject,
)
from ..accounts.money import currency_of
from ..accounts.monotonic_clock import MonotonicClock
from ..accounts.windows import Amounts, WindowState
from ..store.statements import FOR_UPDATE, PAIRS, fetch, insert_rows, parameter, pipelined
from ..store.store import Store
from ..store.tables import buckets, ledger, limits, new_epoch
from ..store.tables import windows as window_table
from .asked import Asked, limited, wanted_of
from .lease import Bucket, Reservation
from .settlement import LEDGER_FIRST, save_windows
from .slices import HOLD_OFF_SECONDS, Drawn, is_shared

END_USER_IDLE_SECONDS = 3660
"""How long a window of an end user is kept after its last use; of the longest window of rates, nothing is lost then."""
MAX_END_USER_WINDOWS = 100_000
PRUNE_ROWS = 2000
"""Windows that one transaction deletes, so that it holds the write lock of SQLite only for a moment."""
RECALL_SECONDS = 2
"""So long a request that is refused waits for what is lent of its limits: its holders ask several times a second."""
RETRY_SECONDS = 30.0
"""The ``Retry-After`` of what an operator has to put right."""


class WindowsAhead(Unavailable):
    """A window lies in the future; the store itself is well."""


class WindowMissing(Exception):
    """A limit has no window yet; ``open_windows`` creates it, and the reservation starts over."""

    def __init__(self, subjects: tuple[Subject, ...]) -> None:
        super().__init__(subjects)
        self.subjects = subjects


class LentElsewhere(Exception):
    """``refusal`` would be one if what is lent were used; it has been recalled, and is back in a moment."""

    def __init__(self, refusal: RequestError) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class Admitted(Struct, frozen=True, kw_only=True):
    """The outcome of an admission; ``drawn`` says from which slices, if it was from some."""

    limits: tuple[LimitStatus, ...]
    within_reserve: bool
    beyond: tuple[Limit, ...] = ()
    drawn: Drawn | None = None


_LIMITS = {
    name: f"SELECT scope, subject, kind, value, soft FROM limits WHERE (scope, subject) IN {PAIRS[name]}"
    for name in PAIRS
}
_WINDOWS = {
    name: f"SELECT scope, subject, state FROM windows WHERE (scope, subject) IN {PAIRS[name]} "
    f"ORDER BY scope, subject {FOR_UPDATE[name]}"
    for name in PAIRS
}


Reply: TypeAlias = Admitted | Exception


def reserve(
    connection: sa.Connection, reservation: Reservation, store: Store, *, row: dict[str, object], clock: MonotonicClock
) -> Admitted:
    """Write the open row and charge the windows. Raises ``LimitExceeded``, ``WindowMissing``, ``IntegrityError``."""
    (reply,) = reserve_all(connection, [Asked(reservation=reservation, row=row)], store, clock=clock, commit=False)
    if isinstance(reply, LentElsewhere):
        raise reply.refusal
    if isinstance(reply, Exception):
        raise reply
    return reply


def reserve_all(
    connection: sa.Connection, asked: Sequence[Asked], store: Store, *, clock: MonotonicClock, commit: bool = True
) -> list[Reply]:
    """Admit reservations one after the other, in one transaction, and return for each what became of it.

    Only those that are admitted have rows and are charged. On PostgreSQL this takes two round trips, the second of
    which commits (``commit``). The ledger's lock comes first, so a window that is being built is either seen whole, or
    its builder waits for this transaction. If another process is ahead, ``clock`` moves up to the windows' latest
    second, so that windows only ever move forward. Raises ``IntegrityError`` if one of the request ids is in use.
    """
    set_limits, states = _read(connection, asked)
    ahead = move_up_all(clock, states)
    now = int(clock.now())
    replies: list[Reply] = []
    admitted: list[Asked] = []
    charged: set[Subject] = set()
    currency = functools.cache(functools.partial(currency_of, connection))
    for one in asked:
        subjects = subjects_of(one.row)  # type: ignore[arg-type]
        own = {subject: states[subject] for subject in subjects if subject in states}
        try:
            for subject in own:
                if subject in ahead:
                    raise ahead[subject]
            if ended := tuple(subject for subject, state in own.items() if has_ended(state, now)):
                raise WindowMissing(ended)
            found = _pair(_limits_of(set_limits, one.reservation), own, one.row)
            wanted = wanted_of(one)
            shared = is_shared(one.reservation.key_id)
            beyond = admit(found, now, wanted, currency, is_shared=shared)
        except (RequestError, WindowsAhead, WindowMissing) as error:
            recalled = {subject for subject, state in own.items() if _recall(state, now)}
            if recalled and isinstance(error, LimitExceeded | PermissionDenied):
                charged |= recalled  # they are saved
                replies.append(LentElsewhere(error))
            else:
                replies.append(error)
            continue
        for state in own.values():
            windows.charge(state, now, wanted)
        charged |= own.keys()
        replies.append(Admitted(limits=standing(found, now, is_shared=shared), within_reserve=True, beyond=beyond))
        admitted.append(one)
    taken = _take_all(connection, store, admitted, clock)
    rows = [one.row | {"charged_at": now, "bucket_milli": milli} for one, milli in zip(admitted, taken, strict=True)]
    with pipelined(connection, commit=commit):
        if rows:
            insert_rows(connection, ledger, rows)
        save_windows(connection, {subject: states[subject] for subject in sorted(charged)})
    within = iter(one.reservation.bucket is None or milli > 0 for one, milli in zip(admitted, taken, strict=True))
    return [replace(reply, within_reserve=next(within)) if isinstance(reply, Admitted) else reply for reply in replies]


def has_ended(state: WindowState, now: int) -> bool:
    """Return whether a slice was not given back in time: what it has charged is in the ledger alone."""
    return any(lent.until < now for lent in state.lent.values())


def _recall(state: WindowState, now: int) -> bool:
    """Ask for what is lent, and return whether it is worth waiting for: not if it was asked for long ago."""
    if not state.lent:
        return False
    if now - state.recalled > HOLD_OFF_SECONDS:
        state.recalled = now
    return now - state.recalled < RECALL_SECONDS


def _read(
    connection: sa.Connection, asked: Sequence[Asked]
) -> tuple[dict[Subject, list[Limit]], dict[Subject, WindowState]]:
    """Lock the ledger against builders of windows, and return the limits and windows of all that is asked.

    Limits are by (scope, subject) as they were set, windows as they are counted; these are locked.
    """
    named = {pair for one in asked for pair in limited(one.reservation)}
    subjects = {subject for one in asked for subject in subjects_of(one.row)}  # type: ignore[arg-type]
    dialect = connection.dialect.name
    limit_rows, window_rows = fetch(
        connection,
        *LEDGER_FIRST[dialect],
        (_LIMITS[dialect], (parameter(sorted(named)),)),
        (_WINDOWS[dialect], (parameter(sorted(subjects)),)),
    )[-2:]
    set_limits: dict[Subject, list[Limit]] = {}
    for row in limit_rows:
        set_limits.setdefault((row[0], row[1]), []).append(Limit.of_row(*row))
    return set_limits, {(scope, subject): windows.decode(state) for scope, subject, state in window_rows}


def _limits_of(set_limits: dict[Subject, list[Limit]], reservation: Reservation) -> list[Limit]:
    return in_force(limit for pair in limited(reservation) for limit in set_limits.get(pair, ()))


def move_up_all(clock: MonotonicClock, states: dict[Subject, WindowState]) -> dict[Subject, WindowsAhead]:
    """Move ``clock`` up to the latest second of the windows; return those that are too far ahead, with the error."""
    ahead = {}
    for subject, state in states.items():
        try:
            _move_up(clock, {subject: state})
        except WindowsAhead as error:
            ahead[subject] = error
    return ahead


def _take_all(connection: sa.Connection, store: Store, admitted: Sequence[Asked], clock: MonotonicClock) -> list[int]:
    """Take every reservation from its bucket, if it has one; buckets are locked in the order of their subjects."""
    taken = [0] * len(admitted)
    order = sorted(
        range(len(admitted)), key=lambda i: (admitted[i].reservation.endpoint, admitted[i].reservation.entity)
    )
    for i in order:
        reservation = admitted[i].reservation
        if reservation.bucket is not None:
            taken[i] = _take(connection, store, reservation, reservation.bucket, clock)
    return taken


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


def _pair(
    set_limits: list[Limit], states: dict[Subject, WindowState], row: dict[str, object]
) -> list[tuple[Limit, WindowState]]:
    subjects = dict(subjects_of(row))  # type: ignore[arg-type]
    missing = {(limit.scope, subjects[limit.scope]) for limit in set_limits} - set(states)
    if missing:
        raise WindowMissing(tuple(sorted(missing)))
    return [(limit, states[limit.scope, subjects[limit.scope]]) for limit in set_limits]


def open_windows(connection: sa.Connection, store: Store, subjects: tuple[Subject, ...], *, now: int = 0) -> None:
    """Build windows from the ledger while nothing else writes to it. At second ``now`` those of end users are used."""
    store.lock_ledger(connection)
    for scope, subject in subjects:
        this = sa.and_(window_table.c.scope == scope, window_table.c.subject == subject)
        stored = connection.execute(sa.select(window_table.c.state).where(this)).scalar_one_or_none()
        if stored is None or has_ended(windows.decode(stored), now):
            build(connection, store, (scope, subject), now)


def build(connection: sa.Connection, store: Store, subject: Subject, now: int) -> None:
    """Build a window from the ledger. What was lent of an earlier one is void: rows say what was used of it.

    The caller holds ``Store.lock_ledger``.
    """
    state = rebuilt(connection, subject)
    used_at = max(now, state.latest) if subject[0] in END_USER_SCOPES else None
    values = {"state": windows.encode(state), "used_at": used_at, "epoch": new_epoch()}
    row = {"scope": subject[0], "subject": subject[1], **values}
    insert = store.insert(window_table).values(row)
    connection.execute(insert.on_conflict_do_update(index_elements=["scope", "subject"], set_=values))


def prune_windows(connection: sa.Connection, now: int) -> int:
    """Delete windows of end users that were not used for an hour, and the oldest beyond a number; return how many, at
    most ``PRUNE_ROWS``.

    ``open_windows`` builds them again, exactly, when they are needed: this bounds the store, and changes no limit. It
    waits for no window that an admission has locked, which locks several in an order of its own.
    """
    used_at = window_table.c.used_at
    newest = sa.select(used_at).where(used_at.is_not(None)).order_by(used_at.desc())
    last = connection.execute(newest.offset(MAX_END_USER_WINDOWS).limit(1)).scalar_one_or_none()
    before = max(now - END_USER_IDLE_SECONDS, -1 if last is None else last)
    key = (window_table.c.scope, window_table.c.subject)
    old = sa.select(*key).where(used_at <= before).limit(PRUNE_ROWS).with_for_update(skip_locked=True)
    return connection.execute(sa.delete(window_table).where(sa.tuple_(*key).in_(old))).rowcount


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
    connection: sa.Connection,
    *,
    key_id: str,
    tenant: str,
    endpoint: str | None,
    minimum: Amounts,
    clock: MonotonicClock,
) -> None:
    """Raise ``LimitExceeded`` or ``PermissionDenied`` if a request of the ``minimum`` amounts would be refused.

    This is asked before a request is read, so that no body of megabytes is received and tokenised in vain. It reserves
    nothing; ``reserve`` decides.
    ``endpoint`` is None if it is not known yet; its limits are then not checked.
    """
    of_limits: dict[str, Subject] = {"key": ("key", key_id), "tenant": ("tenant", tenant)}
    if endpoint is not None:
        of_limits |= {"endpoint": ("endpoint", endpoint), "user": ("user", user_subject(endpoint, key_id))}
    named = {scope: (endpoint or "") if scope == "user" else subject[1] for scope, subject in of_limits.items()}
    found = connection.execute(sa.select(limits).where(_any(limits, named)))
    set_limits = [Limit.of_row(*row) for row in found]
    if not set_limits:
        return
    columns = (window_table.c.scope, window_table.c.subject, window_table.c.state)
    rows = connection.execute(sa.select(*columns).where(_any(window_table, dict(of_limits.values()))))
    states = {(scope, subject): windows.decode(state) for scope, subject, state in rows}
    for state in states.values():
        state.lent = {}  # it comes back if it is needed
    _move_up(clock, states)
    paired = [(limit, states.get(of_limits[limit.scope], WindowState())) for limit in set_limits]
    shared = is_shared(key_id)
    admit(paired, int(clock.now()), minimum, functools.partial(currency_of, connection), is_shared=shared)


def _any(table: sa.Table, subjects: dict[str, str]) -> sa.ColumnElement[bool]:
    return sa.or_(*(sa.and_(table.c.scope == scope, table.c.subject == name) for scope, name in subjects.items()))
