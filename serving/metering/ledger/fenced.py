"""Transactions of one round trip, for requests that draw from slices: they change rows only where a fence holds.

The fence says that the windows are those whose slices this process holds, and the limits those by which it was lent.
Windows are built while nothing else writes to the ledger, so that a row is either part of a window that is built, or
not written at all. Only for PostgreSQL.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from ..accounts.windows import Amounts
from ..store.statements import (
    FOR_UPDATE,
    PAIRS,
    TEXTS,
    Query,
    changing,
    fetch,
    insertion,
    parameter,
    parameter_of_rows,
)
from ..store.tables import ledger
from .settlement import LEDGER_FIRST, Settlement, closing_of
from .slices import Drawn, Fence, joined

_DIALECT = "postgresql"


def _found(table: str, columns: tuple[str, ...], order: tuple[str, ...]) -> str:
    """Return the SQL of what ``table`` has for the pairs of a parameter, as one text."""
    sorted_by = ", ".join(f'{name} COLLATE "C"' for name in order)
    return (
        f"(SELECT coalesce(string_agg(concat_ws(chr(31), {', '.join(columns)}), chr(30) ORDER BY {sorted_by}), '') "
        f"FROM {table} WHERE (scope, subject) IN {PAIRS[_DIALECT]}) = %s"
    )


_SAME_WINDOWS = _found("windows", ("scope", "subject", "epoch"), ("scope", "subject"))
_SAME_LIMITS = _found("limits", ("scope", "subject", "kind", "value"), ("scope", "subject", "kind"))


def _text(lines: frozenset[Any]) -> str:
    return "\x1e".join("\x1f".join(map(str, line)) for line in sorted(lines))


def _windows_of(fence: Fence) -> tuple[str, str]:
    return parameter(sorted(fence.subjects)), _text(fence.windows)


def _limits_of(fence: Fence) -> tuple[str, str]:
    return parameter(sorted(fence.named)), _text(fence.limits)


def insert(connection: sa.Connection, drawn: Sequence[Drawn]) -> bool:
    """Write the open rows and commit; return False if the fence does not hold, so that none was written.

    Raises ``IntegrityError`` if one of the request ids is in use.
    """
    fence, rows = joined(one.fence for one in drawn), [one.row for one in drawn]
    text = f"{insertion(ledger, tuple(rows[0]))} WHERE {_SAME_WINDOWS} AND {_SAME_LIMITS} RETURNING request_id"
    query: Query = (text, (parameter_of_rows(rows), *_windows_of(fence), *_limits_of(fence)))
    return bool(fetch(connection, *LEDGER_FIRST[_DIALECT], query, commit=True)[-1])


class Closing(Struct, frozen=True, kw_only=True):
    """The values that a settlement gives to an open row, and the change of its windows."""

    values: dict[str, Any]
    change: Amounts


def closing(settlement: Settlement, drawn: Drawn) -> Closing:
    """Return what ``settlement`` makes of the row of ``drawn``, if that is as it was written."""
    found = closing_of(settlement, drawn.row)
    assert found is not None, "the row of a lease is open, and the nonce is its own"
    values, change = found
    return Closing(values={"request_id": settlement.request_id, **values}, change=change)


def close_rows(connection: sa.Connection, closings: Sequence[Closing], drawn: Sequence[Drawn]) -> set[str]:
    """Close rows that are open and commit; return the request ids of those that were closed.

    None is if the windows are not the same any more.
    """
    fence, rows = joined(one.fence for one in drawn), [one.values for one in closings]
    ids = parameter(sorted(str(row["request_id"]) for row in rows))
    query: Query = (
        _closing_text(tuple(rows[0])),
        (ids, *_windows_of(fence), parameter_of_rows(rows)),
    )
    return {request_id for (request_id,) in fetch(connection, *LEDGER_FIRST[_DIALECT], query, commit=True)[-1]}


@functools.cache
def _closing_text(names: tuple[str, ...]) -> str:
    mine = (
        f"SELECT request_id FROM ledger WHERE request_id IN {TEXTS[_DIALECT]} AND status = 'open' AND {_SAME_WINDOWS} "
        f"ORDER BY request_id {FOR_UPDATE[_DIALECT]}"
    )
    update = changing(ledger, ("request_id",), names)
    return (
        f"WITH mine AS ({mine}) {update}, mine "
        "WHERE ledger.request_id = given.request_id AND mine.request_id = given.request_id RETURNING ledger.request_id"
    )
