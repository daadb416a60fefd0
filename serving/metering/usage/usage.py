"""Usage: pages of ledger rows by time, tenant and endpoint, and sums by day, tenant and model."""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Iterator
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import sqlalchemy as sa
from msgspec import Meta, Struct

from ...interface.errors import InvalidField
from ...interface.labels import MAX_TAG_NAME
from ..accounts.money import currency, units
from ..store.store import Store
from ..store.tables import folded, ledger, provisioned_minutes

MAX_PAGE = 10_000
READ_PAGE_ROWS = 1000
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
GroupBy: TypeAlias = str  # one of GROUPS, or TAG and the name of a tag
GROUPS = (
    "day", "hour", "tenant", "endpoint", "entity", "adapter", "key_id", "model_version", "content_hash", "end_user",
)  # fmt: skip
TAG = "tags."
ALLOWED_GROUPS = f"{', '.join(GROUPS)}, {TAG}NAME"
LABELS = ("adapter", "model_version", "content_hash", "end_user", "client_request_id")  # which folded days lack


MONEY = ("price_input", "price_cached", "price_output", "cost")


class UsageFilter(Struct, frozen=True, kw_only=True):
    """A filter of rows that started in [start_ms, end_ms) and match the fields that are given. ``tag`` is a tag's name
    and value."""

    start_ms: int = 0
    end_ms: int | None = None
    tenant: str | None = None
    endpoint: str | None = None
    entity: str | None = None
    key_id: str | None = None
    status: str | None = None
    adapter: str | None = None
    model_version: str | None = None
    content_hash: str | None = None
    end_user: str | None = None
    client_request_id: str | None = None
    tag: tuple[str, str] | None = None

    @property
    def by_label(self) -> bool:
        """Whether it selects by what only rows have: folded days and reserved time have no labels."""
        return self.tag is not None or any(getattr(self, name) is not None for name in LABELS)


class UsageRow(Struct, frozen=True, kw_only=True):
    """One request. ``cost`` is in micro-units; an open row has its last checkpointed counts and ``cost`` 0.

    ``generated_tokens`` is the engine's own count, some seconds late. If it exceeds ``completion_tokens``, the
    difference was generated but never reached the gateway (the request was cut off, or an engine died); it is not
    billed. ``draft_tokens`` and ``accepted_draft_tokens`` (of speculative decoding) are only counted for requests that
    ran to their end. The last six fields are None in rows from before they were recorded, and for what is not known or
    was not given.
    """

    request_id: str
    key_id: str
    tenant: str
    endpoint: str
    entity: str
    adapter: str | None
    mode: str
    task: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    price_input: int
    price_cached: int
    price_output: int
    cost: int
    started_ms: int
    ended_ms: int | None
    finish_reason: str | None
    status: str
    model_version: str | None = None
    content_hash: str | None = None
    end_user: str | None = None
    client_request_id: str | None = None
    tags: dict[str, str] | None = None
    adapter_hash: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the row in the API's form, with money as decimal strings."""
        row: dict[str, Any] = msgspec.structs.asdict(self)
        return row | {name: units(row[name]) for name in MONEY}


class UsagePage(Struct, frozen=True, kw_only=True):
    """A page of rows. A ``next_cursor`` of None means that this is the last page so far."""

    rows: tuple[UsageRow, ...]
    next_cursor: str | None


class UsageSum(Struct, frozen=True, kw_only=True):
    """A sum. ``group`` has the values of the columns grouped by, in their order; a day is "2026-11-21", an hour
    "2026-11-21T09:00Z", in UTC."""

    group: tuple[str, ...]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    cost: int

    def to_wire(self, by: tuple[GroupBy, ...]) -> dict[str, Any]:
        """Return the sum in the API's form: group columns by name, counts, and cost as a decimal string."""
        row: dict[str, Any] = msgspec.structs.asdict(self)
        return dict(zip(by, row.pop("group"), strict=True)) | row | {"cost": units(self.cost)}


class UsageSource(Protocol):
    """A source of bills, exports and plots: a ledger, or a server that has one."""

    def currency(self) -> str: ...

    def rows(self, what: UsageFilter) -> Iterator[UsageRow]: ...

    def sums(self, what: UsageFilter, by: tuple[GroupBy, ...]) -> tuple[UsageSum, ...]: ...

    def provisioned_cost(self, what: UsageFilter) -> tuple[tuple[str, str, str, int, int], ...]: ...


def bill(source: UsageSource, what: UsageFilter, by: tuple[GroupBy, ...]) -> dict[str, Any]:
    """Return sums and reserved throughput in the API's form, with money as decimal strings."""
    names = ("tenant", "endpoint", "entity", "unit_minutes", "cost")
    # reserved time belongs to a tenant, not to a single key, user or version
    rows = () if what.key_id is not None or what.by_label else source.provisioned_cost(what)
    return {
        "currency": source.currency(),
        "usage": [total.to_wire(by) for total in source.sums(what, by)],
        "provisioned": [dict(zip(names, (*row[:-1], units(row[-1])), strict=True)) for row in rows],
    }


_Cursor = tuple[Annotated[int, Meta(ge=0, lt=2**53)], Annotated[str, Meta(max_length=256)]]
_EXACT = ("tenant", "endpoint", "entity", "key_id", "status")  # which rows and folded days have
_COUNTS = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "generated_tokens", "draft_tokens",
    "accepted_draft_tokens", "cost",
)  # fmt: skip
_COLUMNS = [ledger.c[name] for name in UsageRow.__struct_fields__]


class Usage:
    def __init__(self, store: Store) -> None:
        self._store = store

    def currency(self) -> str:
        return currency(self._store)

    def page(self, what: UsageFilter, *, limit: int = 100, cursor: str | None = None) -> UsagePage:
        """Return rows sorted by (start, request id), oldest first.

        A cursor stays valid while rows are added and settled. Raises ``InvalidField`` for ``limit`` and ``cursor``.
        """
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_PAGE:
            raise InvalidField("limit", limit, f"an integer from 1 to {MAX_PAGE}")
        query = sa.select(*_COLUMNS).where(*_conditions(what))
        if cursor is not None:
            started_ms, request_id = _from_cursor(cursor)
            after = sa.and_(ledger.c.started_ms == started_ms, ledger.c.request_id > request_id)
            query = query.where(ledger.c.started_ms >= started_ms).where(
                sa.or_(ledger.c.started_ms > started_ms, after)
            )
        query = query.order_by(ledger.c.started_ms, ledger.c.request_id).limit(limit + 1)
        found = self._store.read(lambda connection: connection.execute(query).all())
        rows = tuple(UsageRow(**row._mapping) for row in found[:limit])
        return UsagePage(rows=rows, next_cursor=_to_cursor(rows[-1]) if len(found) > limit else None)

    def newest(self, what: UsageFilter, limit: int) -> tuple[UsageRow, ...]:
        """Return the last ``limit`` rows that match, the newest first; open ones with their last counts."""
        query = sa.select(*_COLUMNS).where(*_conditions(what))
        query = query.order_by(ledger.c.started_ms.desc(), ledger.c.request_id.desc()).limit(limit)
        found = self._store.read(lambda connection: connection.execute(query).all())
        return tuple(UsageRow(**row._mapping) for row in found)

    def rows(self, what: UsageFilter) -> Iterator[UsageRow]:
        """Yield every matching row, read in pages."""
        cursor = None
        while True:
            page = self.page(what, limit=READ_PAGE_ROWS, cursor=cursor)
            yield from page.rows
            cursor = page.next_cursor
            if cursor is None:
                return

    def sums(self, what: UsageFilter, by: tuple[GroupBy, ...] = ("day", "tenant", "entity")) -> tuple[UsageSum, ...]:
        """Return sums over the closed rows that match, ordered by group. Raises ``InvalidField`` for ``by``.

        A folded day counts if its first millisecond is in the filter's time, and in its first hour; it has no labels
        and no adapters. A group without a label or an adapter has "" in its place.
        """
        if not by or not all(map(is_group, by)) or len(set(by)) != len(by):
            raise InvalidField("by", ",".join(map(str, by)), f"one or more of {ALLOWED_GROUPS}")
        rows, days = [_group(name) for name in by], [_folded_group(name) for name in by]
        both = sa.union_all(  # one statement sees one state, so that rows folded meanwhile count once
            _summed(rows, sa.func.count(), ledger).where(*_conditions(what), ledger.c.status != "open"),
            _summed(days, sa.func.sum(folded.c.requests), folded).where(*_folded_conditions(what)),
        )
        totals: dict[tuple[Any, ...], list[int]] = {}
        for row in self._store.read(lambda connection: connection.execute(both).all()):
            total = totals.setdefault(tuple(row[: len(by)]), [0] * (1 + len(_COUNTS)))
            for place, value in enumerate(row[len(by) :]):
                total[place] += int(value)
        return tuple(_sum(by, group, total) for group, total in sorted(totals.items()))

    def provisioned_cost(self, what: UsageFilter) -> tuple[tuple[str, str, str, int, int], ...]:
        """Return (tenant, endpoint, entity, unit-minutes, micro-units) of provisioned throughput within the filter."""
        table = provisioned_minutes.c
        names = (table.tenant, table.endpoint, table.entity)
        query = sa.select(*names, sa.func.sum(table.units), sa.func.sum(table.cost))
        query = query.where(table.minute * 60_000 >= what.start_ms)
        if what.end_ms is not None:
            query = query.where(table.minute * 60_000 < what.end_ms)
        for name in ("tenant", "endpoint", "entity"):
            if getattr(what, name) is not None:
                query = query.where(table[name] == getattr(what, name))
        query = query.group_by(*names).order_by(*names)
        found = self._store.read(lambda connection: connection.execute(query).all())
        return tuple((row[0], row[1], row[2], int(row[3]), int(row[4])) for row in found)


def is_group(name: Any) -> bool:
    """Return whether usage can be summed by ``name``."""
    if not isinstance(name, str):
        return False
    return name in GROUPS or (name.startswith(TAG) and is_selectable(name.removeprefix(TAG)))


def is_selectable(tag: str) -> bool:
    """Return whether rows can be selected by a tag of this name: databases know no path to some."""
    return 0 < len(tag) <= MAX_TAG_NAME and tag.isprintable() and not set(tag) & set('"\\')


def _group(name: GroupBy) -> Any:
    if name in ("day", "hour"):
        return ledger.c.started_ms // (DAY_MS if name == "day" else HOUR_MS)
    return sa.func.coalesce(_tag(name.removeprefix(TAG)) if name.startswith(TAG) else ledger.c[name], "")


def _folded_group(name: GroupBy) -> Any:
    if name == "hour":
        return folded.c.day * (DAY_MS // HOUR_MS)
    return folded.c[name] if name in folded.c else sa.literal("", sa.String)


def _tag(name: str) -> sa.ColumnElement[str]:
    return ledger.c.tags[name].as_string()


def _conditions(what: UsageFilter) -> list[sa.ColumnElement[bool]]:
    conditions = [ledger.c.started_ms >= what.start_ms]
    if what.end_ms is not None:
        conditions.append(ledger.c.started_ms < what.end_ms)
    for name in (*_EXACT, *LABELS):
        if getattr(what, name) is not None:
            conditions.append(ledger.c[name] == getattr(what, name))
    if what.tag is not None:
        conditions.append(_tag(what.tag[0]) == what.tag[1])
    return conditions


def _folded_conditions(what: UsageFilter) -> list[sa.ColumnElement[bool]]:
    if what.by_label:
        return [sa.false()]
    conditions = [folded.c.day >= -(-what.start_ms // DAY_MS)]
    if what.end_ms is not None:
        conditions.append(folded.c.day < -(-what.end_ms // DAY_MS))
    for name in _EXACT:
        if getattr(what, name) is not None:
            conditions.append(folded.c[name] == getattr(what, name))
    return conditions


def _summed(columns: list[Any], requests: Any, table: sa.Table) -> sa.Select[Any]:
    places = [sa.text(str(place + 1)) for place in range(len(columns))]  # by position: the day is an expression
    return sa.select(*columns, requests, *(sa.func.sum(table.c[name]) for name in _COUNTS)).group_by(*places)


def _sum(by: tuple[GroupBy, ...], group: tuple[Any, ...], counts: list[int]) -> UsageSum:
    written = {"day": lambda value: day(int(value)), "hour": lambda value: hour(int(value))}
    named = tuple(written.get(name, str)(value) for name, value in zip(by, group, strict=True))
    return UsageSum(group=named, requests=counts[0], **dict(zip(_COUNTS, counts[1:], strict=True)))


def day(number: int) -> str:
    """Convert days since the epoch to an ISO date."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=number)).isoformat()


def hour(number: int) -> str:
    """Convert hours since the epoch to an ISO time in UTC."""
    return f"{day(number // 24)}T{number % 24:02}:00Z"


def _to_cursor(row: UsageRow) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((row.started_ms, row.request_id))).decode()


def _from_cursor(cursor: str) -> tuple[int, str]:
    try:
        found = msgspec.json.decode(base64.b64decode(cursor, altchars=b"-_", validate=True), type=_Cursor)
        if "\0" in found[1]:  # no request id has one, and PostgreSQL accepts none in a text
            raise ValueError("a NUL")
        return found
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise InvalidField("cursor", cursor, "a next_cursor of an earlier page") from error
