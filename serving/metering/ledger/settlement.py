"""Settlement: the transaction that closes ledger rows and corrects the windows and the buckets, exactly once.

::

    status     open ──────► ok | error | aborted         the process that admitted it reports the usage
               open ──────► recovered                    that process ended first: its counts until then are used
               recovered ─► ok | error | aborted         its spool arrived later (a host came back): exact again
               recovered ─► recovered                    its progress file arrived later: the larger counts are used
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.limits import END_USER_SCOPES, Subject, subjects_of
from ..accounts.money import Price, cost
from ..accounts.windows import Amounts, WindowState
from ..store.statements import FOR_UPDATE, TEXTS, Query, fetch, parameter, pipelined, update_rows
from ..store.store import Store
from ..store.tables import buckets, ledger
from ..store.tables import windows as window_table

Status: TypeAlias = Literal["ok", "error", "aborted", "recovered"]


class Settlement(Struct, frozen=True, kw_only=True):
    """The usage of a request.

    ``prompt`` includes ``cached``. With a ``nonce``, it applies only to a row that was written with that nonce.
    ``drafts`` are draft tokens, ``accepted_drafts`` of which are in the completion; they are not billed. ``output`` has
    the hashes of the answer (``proof.answers``), in JSON.
    """

    request_id: str
    prompt: int
    cached: int
    completion: int
    finish_reason: str | None
    status: Status
    ended_ms: int
    nonce: str | None = None
    drafts: int = 0
    accepted_drafts: int = 0
    output: str | None = None


_SETTLED_BY = tuple(column.name for column in ledger.c if column.name not in ("tags", "proof"))  # which may be long
LEDGER_FIRST: dict[str, tuple[Query, ...]] = {
    "sqlite": (),  # where one transaction writes at a time
    # the planner knows nothing of a young ledger, and would read all of it to find a few rows
    "postgresql": (("LOCK TABLE ledger IN ROW EXCLUSIVE MODE", ()), ("SET LOCAL enable_seqscan = off", ())),
}
_FIND = {
    name: f"SELECT {', '.join(_SETTLED_BY)} FROM ledger WHERE request_id IN {TEXTS[name]} "
    f"ORDER BY request_id {FOR_UPDATE[name]}"
    for name in TEXTS
}
_SUBJECTS = (
    ("'endpoint'", "endpoint"),
    ("'key'", "key_id"),
    ("'tenant'", "tenant"),
    ("'user'", "endpoint || '\n' || key_id"),
    # of rows without an end user these are null, which is the subject of no window
    ("'endpoint_user'", "endpoint || '\n' || tenant || '\n' || limited_user"),
    ("'key_user'", "key_id || '\n' || limited_user"),
    ("'tenant_user'", "tenant || '\n' || limited_user"),
)
_FIND_WINDOWS = {
    name: "SELECT scope, subject, state FROM windows WHERE (scope, subject) IN ("
    + " UNION ".join(f"SELECT {scope}, {of} FROM ledger WHERE request_id IN {TEXTS[name]}" for scope, of in _SUBJECTS)
    + f") ORDER BY scope, subject {FOR_UPDATE[name]}"
    for name in TEXTS
}


def save_windows(connection: sa.Connection, states: dict[Subject, WindowState]) -> None:
    """Replace the states of windows that the transaction has locked."""
    if states:
        rows = [
            {
                "scope": scope,
                "subject": subject,
                "state": windows.encode(state),
                "used_at": state.latest if scope in END_USER_SCOPES else None,
            }
            for (scope, subject), state in states.items()
        ]
        update_rows(connection, window_table, ("scope", "subject"), rows)


def settle(connection: sa.Connection, settlement: Settlement) -> bool:
    """Apply ``settlement``; return False if the row is already closed (or unknown), so that nothing changed."""
    return settle_all(connection, [settlement], commit=False)[0]


def settle_all(connection: sa.Connection, settlements: Sequence[Settlement], *, commit: bool = True) -> list[bool]:
    """Apply settlements one after the other, in one transaction, and return for each what ``settle`` does.

    On PostgreSQL this takes two round trips, the second of which commits (``commit``).
    """
    rows, states = _read(connection, settlements)
    closed: dict[str, dict[str, Any]] = {}
    charged: set[Subject] = set()
    credits: dict[str, int] = {}
    applied = []
    for settlement in settlements:
        row = rows.get(settlement.request_id)
        closing = None if row is None else closing_of(settlement, row)
        applied.append(closing is not None)
        if row is None or closing is None:
            continue
        values, change = closing
        for subject in subjects_of(row):
            if subject in states:
                windows.charge(states[subject], row["charged_at"], change)
                charged.add(subject)
        if row["bucket_milli"]:
            bucket = f"{row['endpoint']}\n{row['entity']}"
            credits[bucket] = credits.get(bucket, 0) + row["bucket_milli"] - values["bucket_milli"]
        closed[settlement.request_id] = {"request_id": settlement.request_id, **values}
        row |= values
    with pipelined(connection, commit=commit):
        if closed:
            update_rows(connection, ledger, ("request_id",), [closed[request_id] for request_id in sorted(closed)])
        save_windows(connection, {subject: states[subject] for subject in sorted(charged)})
        for bucket, milli in sorted(credits.items()):
            _credit_bucket(connection, bucket, milli)
    return applied


def _read(
    connection: sa.Connection, settlements: Sequence[Settlement]
) -> tuple[dict[str, dict[str, Any]], dict[Subject, WindowState]]:
    """Lock and return the rows of ``settlements``, by request id, and the windows in which they count.

    The ledger's lock comes first: a window that is being built is then read whole, or built when all of this is done.
    """
    name, ids = connection.dialect.name, parameter(sorted({settlement.request_id for settlement in settlements}))
    rows, found = fetch(
        connection, *LEDGER_FIRST[name], (_FIND[name], (ids,)), (_FIND_WINDOWS[name], (ids,) * len(_SUBJECTS))
    )[-2:]
    states = {(scope, subject): windows.decode(state) for scope, subject, state in found}
    return {row[0]: dict(zip(_SETTLED_BY, row, strict=True)) for row in rows}, states


def closing_of(settlement: Settlement, found: dict[str, Any]) -> tuple[dict[str, Any], Amounts] | None:
    """Return the values that ``settlement`` gives to its row, and the change of its windows; None if it has none."""
    if found["status"] not in ("open", "recovered") or settlement.nonce not in (None, found["nonce"]):
        return None
    was_open = found["status"] == "open"
    if settlement.status == "recovered":
        settlement = _at_least(settlement, found)
        if not was_open:
            if all(getattr(settlement, name) == found[f"{name}_tokens"] for name in ("prompt", "cached", "completion")):
                return None
            settlement = msgspec.structs.replace(settlement, ended_ms=found["ended_ms"])
    price = Price(input=found["price_input"], cached=found["price_cached"], output=found["price_output"])
    money = cost(price, prompt=settlement.prompt, cached=settlement.cached, completion=settlement.completion)
    before = (
        (found["reserved_input"], found["reserved_output"], found["reserved_cost"])
        if was_open
        else (found["prompt_tokens"], found["completion_tokens"], found["cost"])
    )
    used_milli = settlement.completion * 1000 + settlement.prompt * found["prompt_weight_milli"]
    values = {
        "prompt_tokens": settlement.prompt,
        "cached_tokens": settlement.cached,
        "completion_tokens": settlement.completion,
        "draft_tokens": settlement.drafts,
        "accepted_draft_tokens": settlement.accepted_drafts,
        "cost": money,
        "ended_ms": max(settlement.ended_ms, found["started_ms"]),  # if recovered: the clock may have been set since
        "finish_reason": settlement.finish_reason,
        "status": settlement.status,
        "bucket_milli": used_milli if found["bucket_milli"] else 0,
        "output": settlement.output,
        "chained": None,  # it is linked, or linked anew, by the next upkeep
    }
    change = Amounts(
        input=settlement.prompt - before[0],
        output=settlement.completion - before[1],
        in_flight=-1 if was_open else 0,
        money=money - before[2],
    )
    return values, change


def _at_least(settlement: Settlement, row: Any) -> Settlement:
    """Return ``settlement`` with counts no lower than the row's, whose checkpoint may be newer after a power failure.

    Counts only grow, so that the larger of two is the later one.
    """
    return msgspec.structs.replace(
        settlement,
        prompt=max(settlement.prompt, row["prompt_tokens"]),
        cached=max(settlement.cached, row["cached_tokens"]),
        completion=max(settlement.completion, row["completion_tokens"]),
    )


def _credit_bucket(connection: sa.Connection, subject: str, milli: int) -> None:
    connection.execute(
        sa.update(buckets)
        .where(buckets.c.subject == sa.bindparam("of_subject"))
        .values(level_milli=buckets.c.level_milli + sa.bindparam("credit")),
        {"of_subject": subject, "credit": milli},
    )


def settle_in(store: Store, settlement: Settlement, *, timeout: float | None = None) -> bool:
    return store.write(lambda connection: settle(connection, settlement), timeout=timeout)
