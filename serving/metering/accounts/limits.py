"""Limits of keys, tenants, endpoints and end users: set by an operator, checked in the reservation's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from ...interface.errors import InvalidField, LimitExceeded, PermissionDenied, RequestError
from ...interface.labels import MAX_USER
from ..store.store import Store
from ..store.tables import folded, ledger, limits, provisioned_minutes
from ..store.tables import windows as window_table
from . import windows
from .alert_shares import checked_shares
from .audit import Actor, record
from .money import money, units
from .windows import BUDGETS, KINDS, UNITS, Amounts, Kind, WindowState

Scope: TypeAlias = Literal["key", "tenant", "endpoint", "user", "key_user", "tenant_user", "endpoint_user"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
END_USER_SCOPES: tuple[Scope, ...] = ("key_user", "tenant_user", "endpoint_user")
END_USER_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "budget")
"""The kinds of limits on end users. Folded days have no end users, so a budget without an end could not be counted."""
MAX_VALUE = 2**53
MAX_OWNER = 128  # characters of the name of a key, tenant or endpoint whose end users have limits: of windows' subjects
SHADOW = "shadow"
"""The mode of rows of the ledger for copies of requests (shadow traffic), which use up no limit."""

Subject: TypeAlias = tuple[str, str]
"""(scope, subject) of a window. Scope "user" is one key at one endpoint: its limit is set on the endpoint and holds for
each key by itself; the window's subject is ``user_subject(endpoint, key)``. The scopes of end users are alike: a limit
is set on a key, a tenant or an endpoint (or on one end user there, ``user_subject(tenant, end user)``) and holds for
each end user by itself. End users of different tenants are different, whatever their names: at an endpoint the window's
subject is ``user_subject(endpoint, user_subject(tenant, end user))``."""


class Limit(Struct, frozen=True, kw_only=True):
    """One limit. ``value`` is in tokens, queries, requests or, for a budget, micro-units. ``end_user`` is the only end
    user that it is for; "" means each of them, or that the scope is none of end users. A ``soft`` limit is counted and
    refuses nothing. ``alert_at`` are the shares of it at which webhooks are told; None means those of the server."""

    scope: Scope
    subject: str
    kind: Kind
    value: int
    end_user: str = ""
    soft: bool = False
    alert_at: tuple[float, ...] | None = None

    @classmethod
    def of_row(
        cls,
        scope: Scope,
        subject: str,
        kind: Kind,
        value: int,
        soft: bool | int = False,  # raw rows of SQLite have integers
        alert_at: list[float] | None = None,
    ) -> Limit:
        """Return the limit of a row of the table."""
        name, _, end_user = subject.partition("\n")
        shares = None if alert_at is None else tuple(alert_at)
        return cls(
            scope=scope, subject=name, kind=kind, value=value, end_user=end_user, soft=bool(soft), alert_at=shares
        )

    @property
    def row_subject(self) -> str:
        """The subject of its row in the table."""
        return user_subject(self.subject, self.end_user) if self.end_user else self.subject


class Bound(Struct, frozen=True, kw_only=True):
    """The value of a limit that is set, with what else it says (``Limit``)."""

    value: int
    soft: bool = False
    alert_at: tuple[float, ...] | None = None


class LimitStatus(Struct, frozen=True, kw_only=True):
    """A limit right after an admission: the amount left, and the seconds until all of it is free again."""

    scope: Scope
    kind: Kind
    allowed: int
    remaining: int
    reset_after: int | None


def user_subject(name: str, user: str) -> str:
    return f"{name}\n{user}"


class Limits:
    """The limits of a store, to be set, removed and listed. A limit also counts amounts charged before it was set."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(
        self, scope: str, subject: str, kind: str, value: int | Bound, *, end_user: str = "", by: Actor | None = None
    ) -> Limit:
        """Set a limit. ``value`` is in tokens, queries, requests or (budgets) micro-units; a plain one means a limit
        that refuses, with the server's alerts. Raises ``InvalidField``."""
        return self._store.write(
            lambda connection: self.put(connection, scope, subject, kind, value, end_user=end_user, by=by)
        )

    def put(
        self,
        connection: sa.Connection,
        scope: str,
        subject: str,
        kind: str,
        value: int | Bound,
        *,
        end_user: str = "",
        by: Actor | None,
    ) -> Limit:
        """Do what ``set`` does, inside a given transaction."""
        bound = value if isinstance(value, Bound) else Bound(value=value)
        limit = _checked(scope, subject, kind, bound, end_user)
        before = connection.execute(sa.select(limits).where(_is(limit))).one_or_none()
        values = {"value": limit.value, "soft": limit.soft, "alert_at": limit.alert_at}
        insert = self._store.insert(limits).values(scope=scope, subject=limit.row_subject, kind=kind, **values)
        connection.execute(insert.on_conflict_do_update(index_elements=["scope", "subject", "kind"], set_=values))
        was = None if before is None else _audited(Limit.of_row(*before))
        record(connection, by, "limit.set", _target(scope, subject, end_user), before=was, after=_audited(limit))
        return limit

    def remove(self, scope: str, subject: str, kind: str, *, end_user: str = "", by: Actor | None = None) -> bool:
        """Remove a limit; return False if there was none. Removing a subject's last limit removes its window, or, if it
        has end users, theirs (unless one of them has a limit of its own)."""
        named = user_subject(subject, end_user) if end_user else subject

        def work(connection: sa.Connection) -> bool:
            self._store.lock_ledger(connection)
            of_subject = sa.and_(limits.c.scope == scope, limits.c.subject == named)
            this = sa.and_(of_subject, limits.c.kind == kind)
            before = connection.execute(sa.select(limits).where(this)).one_or_none()
            if before is None:
                return False
            connection.execute(sa.delete(limits).where(this))
            target = _target(scope, subject, end_user)
            record(connection, by, "limit.delete", target, before=_audited(Limit.of_row(*before)))
            if scope in END_USER_SCOPES:
                of_subject = sa.and_(limits.c.scope == scope, _is_of(limits, subject))
            left = connection.execute(sa.select(sa.func.count()).select_from(limits).where(of_subject)).scalar_one()
            if not left:
                owned = window_table.c.subject == subject
                if scope == "user" or scope in END_USER_SCOPES:
                    owned = window_table.c.subject.startswith(f"{subject}\n", autoescape=True)
                connection.execute(sa.delete(window_table).where(window_table.c.scope == scope, owned))
            return True

        return self._store.write(work)

    def list(self, scope: str | None = None, subject: str | None = None) -> tuple[Limit, ...]:
        query = sa.select(limits).order_by(limits.c.scope, limits.c.subject, limits.c.kind)
        if scope is not None:
            query = query.where(limits.c.scope == scope)
        if subject is not None:
            query = query.where(_is_of(limits, subject))
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return tuple(Limit.of_row(*row) for row in rows)


def _audited(limit: Limit) -> dict[str, object]:
    """Return a limit as the audit log has it: its value, and what it says beside."""
    found: dict[str, object] = {limit.kind: plain(limit.kind, limit.value)}
    if limit.soft:
        found["soft"] = True
    if limit.alert_at is not None:
        found["alert_at"] = limit.alert_at
    return found


def _is(limit: Limit) -> sa.ColumnElement[bool]:
    table = limits.c
    return sa.and_(table.scope == limit.scope, table.subject == limit.row_subject, table.kind == limit.kind)


def _is_of(table: sa.Table, subject: str) -> sa.ColumnElement[bool]:
    """Match the rows of ``subject``, and those of its users."""
    return sa.or_(table.c.subject == subject, table.c.subject.startswith(f"{subject}\n", autoescape=True))


def _target(scope: str, subject: str, end_user: str) -> str:
    """Return the name of a subject in the audit log."""
    return f"{scope} {subject}" + (f" {end_user}" if end_user else "")


def delete_limits_of_endpoint(connection: sa.Connection, name: str) -> None:
    """Delete the limits that are set on an endpoint, and the windows counted towards them."""
    for table in (limits, window_table):
        for scope in ("endpoint", "user", "endpoint_user"):
            of_scope = sa.and_(table.c.scope == scope, _is_of(table, name))
            connection.execute(sa.delete(table).where(of_scope))


def plain(kind: Kind, value: int) -> int | str:
    """Return a limit's value in the API's form: money as a decimal string."""
    return units(value) if kind in BUDGETS else value


def amount(kind: Kind, value: int, currency: str) -> str:
    """Describe an amount: ``"25.00 EUR a month"``, ``"20000 output tokens a minute"``."""
    number = money(value, currency or "currency units") if kind in BUDGETS else str(value)
    return f"{number} {UNITS[kind]}"


def _checked(scope: str, subject: str, kind: str, bound: Bound, end_user: str) -> Limit:
    value, alert_at = bound.value, bound.alert_at
    if scope not in SCOPES:
        raise InvalidField("scope", scope, "one of " + ", ".join(SCOPES))
    of_end_users = scope in END_USER_SCOPES
    if not isinstance(subject, str) or not 0 < len(subject) <= 256 or set("\0\n") & set(subject):
        raise InvalidField("subject", subject, "a name of 1 to 256 characters, on one line")
    if end_user and not of_end_users:
        raise InvalidField("end_user", end_user, f"no end user: only the scopes {', '.join(END_USER_SCOPES)} have one")
    if len(end_user) > MAX_USER or "\0" in end_user:
        raise InvalidField("end_user", end_user, f"a name of at most {MAX_USER} characters")
    if of_end_users and len(subject) > MAX_OWNER:
        raise InvalidField("subject", subject, f"a name of at most {MAX_OWNER} characters, where end users have limits")
    if kind not in KINDS:
        raise InvalidField("kind", kind, "one of " + ", ".join(KINDS))
    if of_end_users and kind not in END_USER_KINDS:
        raise InvalidField("kind", kind, f"for end users one of {', '.join(END_USER_KINDS)}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_VALUE:
        raise InvalidField("value", value, f"an integer from 0 to {MAX_VALUE}")
    for name, given in (("soft", bound.soft), ("alert_at", alert_at)):
        if kind == "in_flight" and given:
            raise InvalidField(name, given, "none for in_flight, which counts in no window")
    if alert_at is not None:
        alert_at = checked_shares("alert_at", alert_at)
    named = Limit(scope=scope, subject=subject, kind=kind, value=value, end_user=end_user)
    return replace(named, soft=bound.soft, alert_at=alert_at)


def admit(
    found: Iterable[tuple[Limit, WindowState]],
    now: int,
    wanted: Amounts,
    currency: Callable[[], str] = str,
    *,
    is_shared: bool = False,
) -> tuple[Limit, ...]:
    """Check that all limits have room for ``wanted``, and return the soft ones that have not, which refuse nothing.

    Raises ``LimitExceeded`` for the limit with the longest wait. If waiting never helps, raises ``RequestError`` (the
    request alone is too large) or ``PermissionDenied`` (a budget is spent for good, or a limit is zero). ``currency``
    is called for the message of a refusal.

    ``is_shared`` means that other callers use the endpoint. The remaining amounts of its limits are then not shown,
    since the others' usage could be inferred from them.
    """
    worst: tuple[float, Limit, int, int | None] | None = None
    beyond = []
    for limit, state in found:
        have, want = windows.used(state, limit.kind, now), wanted.of(limit.kind)
        lent = windows.lent(state, limit.kind)
        if want <= 0 or have + lent + want <= limit.value:
            continue
        if limit.soft:
            beyond.append(limit)
            continue
        at = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=want)
        if have + want <= limit.value:  # it is lent, and comes back
            at = now + 1
        have += lent
        wait = float("inf") if at is None else float(at)
        if worst is None or wait > worst[0]:
            worst = (wait, limit, max(0, limit.value - have), at)
    if worst is not None:
        wait, limit, left, at = worst
        shown = None if is_shared and _is_of_all(limit) else left
        _refuse(limit, wanted.of(limit.kind), shown, at, now, currency() if limit.kind in BUDGETS else "")
    return tuple(beyond)


def _is_of_all(limit: Limit) -> bool:
    return limit.scope == "endpoint"


def shown_to_caller(found: Iterable[Limit], *, is_shared: bool) -> tuple[Limit, ...]:
    """Return the limits of which a caller may learn how they stand; with ``is_shared``, only its own limits."""
    return tuple(limit for limit in found if not (is_shared and _is_of_all(limit)))


def _refuse(limit: Limit, wanted: int, remaining: int | None, at: int | None, now: int, currency: str) -> None:
    text = f"{limit.kind}: {_whose(limit)} is {amount(limit.kind, limit.value, currency)}; "
    left = "" if remaining is None else f"{plain(limit.kind, remaining)} are left and "
    text += f"{left}this request needs {plain(limit.kind, wanted)}"
    # clients retry a 429, some of them forever
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


def _whose(limit: Limit) -> str:
    if limit.scope not in END_USER_SCOPES:
        return f"the {limit.scope}'s limit"
    owner = limit.scope.removesuffix("_user")
    return (
        f"the limit of this end user of the {owner}" if limit.end_user else f"the limit of each end user of the {owner}"
    )


def standing(
    found: Iterable[tuple[Limit, WindowState]], now: int, *, is_shared: bool = False
) -> tuple[LimitStatus, ...]:
    """Return, for each kind, the limit with the least left; with ``is_shared``, only of the caller's own limits.

    Soft limits are left out, because clients wait where nothing is left.
    """
    strictest: dict[Kind, LimitStatus] = {}
    for limit, state in found:
        if limit.soft or (is_shared and _is_of_all(limit)):
            continue
        remaining = max(0, limit.value - windows.used(state, limit.kind, now))
        known = strictest.get(limit.kind)
        if known is None or remaining < known.remaining:
            reset = windows.free_at(state, limit.kind, now, allowed=limit.value, wanted=limit.value)
            strictest[limit.kind] = LimitStatus(
                scope=limit.scope,
                kind=limit.kind,
                allowed=limit.value,
                remaining=remaining,
                reset_after=None if reset is None else reset - now,
            )
    return tuple(strictest.values())


def subjects_of(row: Mapping[str, str]) -> tuple[Subject, ...]:
    """Return the windows in which a request of this key, tenant and endpoint counts, in the order of locking.

    A copy of a request counts in none.
    """
    if row.get("mode") == SHADOW:
        return ()
    return (
        ("endpoint", row["endpoint"]),
        ("key", row["key_id"]),
        ("tenant", row["tenant"]),
        ("user", user_subject(row["endpoint"], row["key_id"])),
        *_end_users(row["endpoint"], row["key_id"], row["tenant"], row.get("limited_user") or ""),
    )


def _end_users(endpoint: str, key_id: str, tenant: str, end_user: str) -> tuple[Subject, ...]:
    if not end_user:
        return ()
    return (
        ("endpoint_user", user_subject(endpoint, user_subject(tenant, end_user))),
        ("key_user", user_subject(key_id, end_user)),
        ("tenant_user", user_subject(tenant, end_user)),
    )


def limited_by(endpoint: str, key_id: str, tenant: str, end_user: str) -> tuple[Subject, ...]:
    """Return (scope, subject) of the limits, as they are set, that apply to a request of this endpoint, key, tenant and
    end user ("" if none was named by a caller who may)."""
    owners = {"endpoint_user": endpoint, "key_user": key_id, "tenant_user": tenant} if end_user else {}
    return (
        ("endpoint", endpoint),
        ("key", key_id),
        ("tenant", tenant),
        ("user", endpoint),
        *owners.items(),
        *((scope, user_subject(owner, end_user)) for scope, owner in owners.items()),
    )


def in_force(found: Iterable[Limit]) -> list[Limit]:
    """Return the limits of a request without those of each end user that this end user's own limits replace."""
    limits = list(found)
    own = {(limit.scope, limit.kind) for limit in limits if limit.end_user}
    return [limit for limit in limits if limit.end_user or (limit.scope, limit.kind) not in own]


def rebuilt(connection: sa.Connection, subject: Subject) -> WindowState:
    """Compute the window of ``subject`` from the ledger alone; the caller holds ``Store.lock_ledger``.

    A stored window must equal it in all slots that are still live (``check_integrity``).
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
    query = (
        query.where(_rows_of(ledger, subject), ledger.c.mode != SHADOW)
        .group_by(ledger.c.charged_at)
        .order_by(ledger.c.charged_at)
    )
    for at, prompt, completion, queries, in_flight, spent in connection.execute(query):
        windows.charge(
            state,
            int(at),
            Amounts(
                input=int(prompt),
                output=int(completion),
                queries=int(queries),
                in_flight=int(in_flight),
                money=int(spent),
            ),
        )
    for at, spent in _folded_of(connection, subject) + _minutes_of(connection, subject):
        windows.charge(state, at, Amounts(money=spent))
    return state


def _rows_of(table: sa.Table, subject: Subject) -> sa.ColumnElement[bool]:
    scope, name = subject
    if scope == "user":
        endpoint, _, key_id = name.partition("\n")
        return sa.and_(table.c.endpoint == endpoint, table.c.key_id == key_id)
    if scope in END_USER_SCOPES:
        owner, _, end_user = name.partition("\n")
        if scope == "endpoint_user":
            tenant, _, end_user = end_user.partition("\n")
            owned = sa.and_(table.c.endpoint == owner, table.c.tenant == tenant)
        else:
            owned = {"key_user": table.c.key_id, "tenant_user": table.c.tenant}[scope] == owner
        return sa.and_(owned, table.c.limited_user == end_user)
    return {"key": table.c.key_id, "tenant": table.c.tenant, "endpoint": table.c.endpoint}[scope] == name


def _folded_of(connection: sa.Connection, subject: Subject) -> list[tuple[int, int]]:
    """Return the cost of folded days, which count only in budgets. They have no end users."""
    if subject[0] in END_USER_SCOPES:
        return []
    query = sa.select(folded.c.day, sa.func.sum(folded.c.cost)).where(_rows_of(folded, subject)).group_by(folded.c.day)
    return [(int(day) * windows.DAY_SECONDS, int(spent)) for day, spent in connection.execute(query)]


def _minutes_of(connection: sa.Connection, subject: Subject) -> list[tuple[int, int]]:
    table = provisioned_minutes.c
    if subject[0] not in ("tenant", "endpoint"):
        return []
    column = table.tenant if subject[0] == "tenant" else table.endpoint
    query = sa.select(table.minute, table.cost).where(column == subject[1]).order_by(table.minute)
    return [(int(minute) * 60, int(spent)) for minute, spent in connection.execute(query)]


def check_integrity(store: Store) -> None:
    """Raise ``AssertionError`` if a stored window differs from the sum of the ledger's rows.

    A window of which slices are lent may lack what they have charged, but no more than was lent.
    """

    def work(connection: sa.Connection) -> None:
        store.lock_ledger(connection)
        rows = sa.select(window_table.c.scope, window_table.c.subject, window_table.c.state)
        for scope, subject, stored in connection.execute(rows).all():
            state, expected = windows.decode(stored), rebuilt(connection, (scope, subject))
            now = max(state.latest, expected.latest)
            for kind in END_USER_KINDS if scope in END_USER_SCOPES else KINDS:
                have, want = windows.used(state, kind, now), windows.used(expected, kind, now)
                lent = windows.lent(state, kind)
                is_right = have == want or (state.lent and want <= have + lent)
                assert is_right, f"{scope} {subject!r} {kind}: the window says {have}, the ledger {want}, lent {lent}"

    store.write(work)
