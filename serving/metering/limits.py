"""Limits by key, tenant and endpoint: set by an operator, checked inside the reservation's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import sqlalchemy as sa
from msgspec import Struct

from ..errors import InvalidField, LimitExceeded, PermissionDenied, RequestError
from . import windows
from .store import Store
from .tables import folded, ledger, limits, provisioned_minutes
from .tables import windows as window_table
from .windows import KINDS, UNITS, Amounts, Kind, WindowState

Scope: TypeAlias = Literal["key", "tenant", "endpoint", "user"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
MAX_VALUE = 2**53

Subject: TypeAlias = tuple[str, str]
"""(scope, subject) of a window. Scope "user" is one key at one endpoint: its limit is set on the endpoint and holds for
each key by itself; the window's subject is ``user_subject(endpoint, key)``."""


class Limit(Struct, frozen=True, kw_only=True):
    scope: Scope
    subject: str
    kind: Kind
    value: int


class LimitStatus(Struct, frozen=True, kw_only=True):
    """How a limit stands right after an admission. ``reset_at`` (epoch seconds) is when it is wholly free again."""

    scope: Scope
    kind: Kind
    allowed: int
    remaining: int
    reset_at: int | None


def user_subject(endpoint: str, key_id: str) -> str:
    return f"{endpoint}\n{key_id}"


class Limits:
    """Set, remove and list limits. A limit counts what was charged before it was set, too."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, scope: str, subject: str, kind: str, value: int) -> Limit:
        """``value`` is tokens, queries, requests or micro-units (see ``windows.UNITS``). Raises ``InvalidField``."""
        limit = _checked(scope, subject, kind, value)

        def work(connection: sa.Connection) -> None:
            insert = self._store.insert(limits).values(scope=scope, subject=subject, kind=kind, value=value)
            connection.execute(
                insert.on_conflict_do_update(index_elements=["scope", "subject", "kind"], set_={"value": value})
            )

        self._store.write(work)
        return limit

    def remove(self, scope: str, subject: str, kind: str) -> bool:
        """False where there was no such limit. The last one of a subject takes its window with it."""

        def work(connection: sa.Connection) -> bool:
            self._store.lock_ledger(connection)
            of_subject = sa.and_(limits.c.scope == scope, limits.c.subject == subject)
            found = connection.execute(sa.delete(limits).where(of_subject, limits.c.kind == kind)).rowcount
            left = connection.execute(sa.select(sa.func.count()).select_from(limits).where(of_subject)).scalar_one()
            if not left:
                owned = window_table.c.subject == subject
                if scope == "user":
                    owned = window_table.c.subject.startswith(f"{subject}\n", autoescape=True)
                connection.execute(sa.delete(window_table).where(window_table.c.scope == scope, owned))
            return found > 0

        return self._store.write(work)

    def list(self, scope: str | None = None, subject: str | None = None) -> tuple[Limit, ...]:
        query = sa.select(limits).order_by(limits.c.scope, limits.c.subject, limits.c.kind)
        if scope is not None:
            query = query.where(limits.c.scope == scope)
        if subject is not None:
            query = query.where(limits.c.subject == subject)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return tuple(Limit(**row._mapping) for row in rows)


def _checked(scope: str, subject: str, kind: str, value: int) -> Limit:
    if scope not in SCOPES:
        raise InvalidField("scope", scope, "one of " + ", ".join(SCOPES))
    if not isinstance(subject, str) or not 0 < len(subject) <= 256:
        raise InvalidField("subject", subject, "a name of 1 to 256 characters")
    if kind not in KINDS:
        raise InvalidField("kind", kind, "one of " + ", ".join(KINDS))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_VALUE:
        raise InvalidField("value", value, f"an integer from 0 to {MAX_VALUE}")
    return Limit(scope=scope, subject=subject, kind=kind, value=value)


def admit(found: Iterable[tuple[Limit, WindowState]], now: int, wanted: Amounts) -> None:
    """Return where all limits have room. Else raise, of the limit that holds the caller up longest: ``LimitExceeded``,
    or where waiting never helps ``RequestError`` (the request alone is too large) or ``PermissionDenied`` (a budget is
    spent for good, a limit is zero)."""
    worst: tuple[float, Limit, int, int | None] | None = None
    for limit, state in found:
        have, want = windows.used(state, limit.kind, now), wanted.of(limit.kind)
        if want <= 0 or have + want <= limit.value:
            continue
        at = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=want)
        wait = float("inf") if at is None else float(at)
        if worst is None or wait > worst[0]:
            worst = (wait, limit, max(0, limit.value - have), at)
    if worst is not None:
        _refuse(worst[1], wanted.of(worst[1].kind), worst[2], worst[3], now)


def _refuse(limit: Limit, wanted: int, remaining: int, at: int | None, now: int) -> None:
    text = f"{limit.kind}: the {limit.scope}'s limit is {limit.value} {UNITS[limit.kind]}; "
    text += f"{remaining} are left and this request needs {wanted}"
    # clients retry a 429, some without an end
    if wanted > limit.value > 0:
        param = "max_tokens" if limit.kind == "otpm" else None
        raise RequestError(f"{text}, more than the limit ever allows", param=param)
    if at is None or limit.value == 0:
        raise PermissionDenied(text)
    raise LimitExceeded(
        f"{text}; try again in {max(1, at - now)} s",
        limit=limit.kind,
        allowed=limit.value,
        remaining=remaining,
        retry_after=float(at - now),
    )


def standing(found: Iterable[tuple[Limit, WindowState]], now: int) -> tuple[LimitStatus, ...]:
    """For each kind the limit with the least left."""
    strictest: dict[Kind, LimitStatus] = {}
    for limit, state in found:
        remaining = max(0, limit.value - windows.used(state, limit.kind, now))
        known = strictest.get(limit.kind)
        if known is None or remaining < known.remaining:
            reset = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=limit.value)
            strictest[limit.kind] = LimitStatus(
                scope=limit.scope, kind=limit.kind, allowed=limit.value, remaining=remaining, reset_at=reset
            )
    return tuple(strictest.values())


def subjects_of(row: Mapping[str, str]) -> tuple[Subject, ...]:
    """The windows that a request of this key, tenant and endpoint counts in, in the order they are locked."""
    return (
        ("endpoint", row["endpoint"]),
        ("key", row["key_id"]),
        ("tenant", row["tenant"]),
        ("user", user_subject(row["endpoint"], row["key_id"])),
    )


def rebuilt(connection: sa.Connection, subject: Subject) -> WindowState:
    """The window of ``subject`` computed from the ledger alone; the caller holds ``Store.lock_ledger``.

    It is also what a stored window must equal (``check_integrity``), as far as its slots are still live.
    """
    state = WindowState()
    query = sa.select(
        ledger.c.charged_at,
        sa.func.sum(sa.case((ledger.c.status == "open", ledger.c.reserved_input), else_=ledger.c.prompt_tokens)),
        sa.func.sum(sa.case((ledger.c.status == "open", ledger.c.reserved_output), else_=ledger.c.completion_tokens)),
        sa.func.count(),
        sa.func.sum(sa.case((ledger.c.status == "open", 1), else_=0)),
        sa.func.sum(sa.case((ledger.c.status == "open", ledger.c.reserved_cost), else_=ledger.c.cost)),
    )
    query = query.where(_rows_of(ledger, subject)).group_by(ledger.c.charged_at).order_by(ledger.c.charged_at)
    for at, prompt, completion, queries, in_flight, money in connection.execute(query):
        windows.charge(
            state,
            int(at),
            Amounts(
                input=int(prompt),
                output=int(completion),
                queries=int(queries),
                in_flight=int(in_flight),
                money=int(money),
            ),
        )
    for at, money in _folded_of(connection, subject) + _minutes_of(connection, subject):
        windows.charge(state, at, Amounts(money=money))
    return state


def _rows_of(table: sa.Table, subject: Subject) -> sa.ColumnElement[bool]:
    scope, name = subject
    if scope == "user":
        endpoint, _, key_id = name.partition("\n")
        return sa.and_(table.c.endpoint == endpoint, table.c.key_id == key_id)
    return {"key": table.c.key_id, "tenant": table.c.tenant, "endpoint": table.c.endpoint}[scope] == name


def _folded_of(connection: sa.Connection, subject: Subject) -> list[tuple[int, int]]:
    """Money of days that are no rows any more: only budgets reach so far back."""
    query = sa.select(folded.c.day, sa.func.sum(folded.c.cost)).where(_rows_of(folded, subject)).group_by(folded.c.day)
    return [(int(day) * windows.DAY, int(money)) for day, money in connection.execute(query)]


def _minutes_of(connection: sa.Connection, subject: Subject) -> list[tuple[int, int]]:
    table = provisioned_minutes.c
    if subject[0] not in ("tenant", "endpoint"):
        return []
    column = table.tenant if subject[0] == "tenant" else table.endpoint
    query = sa.select(table.minute, table.cost).where(column == subject[1]).order_by(table.minute)
    return [(int(minute) * 60, int(money)) for minute, money in connection.execute(query)]


def check_integrity(store: Store) -> None:
    """Raise ``AssertionError`` where a stored window differs from what the ledger's rows add up to."""

    def work(connection: sa.Connection) -> None:
        store.lock_ledger(connection)
        for scope, subject, stored in connection.execute(sa.select(window_table)).all():
            state, expected = windows.decode(stored), rebuilt(connection, (scope, subject))
            now = max(state.latest, expected.latest)
            for kind in KINDS:
                have, want = windows.used(state, kind, now), windows.used(expected, kind, now)
                assert have == want, f"{scope} {subject!r} {kind}: the window says {have}, the ledger {want}"

    store.write(work)
