"""Settlement: the transaction that closes a ledger row and corrects the windows and the bucket, exactly once.

::

    status     open ──────► ok | error | aborted         the process that admitted it reports the usage
               open ──────► recovered                    that process ended first: its counts until then are used
               recovered ─► ok | error | aborted         its spool arrived later (a host came back): exact again
               recovered ─► recovered                    its progress file arrived later: the larger counts are used
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.limits import subjects_of
from ..accounts.money import Price, cost
from ..accounts.windows import Amounts, WindowState
from ..store.store import Store
from ..store.tables import buckets, ledger
from ..store.tables import windows as window_table

Status: TypeAlias = Literal["ok", "error", "aborted", "recovered"]


class Settlement(Struct, frozen=True, kw_only=True):
    """The usage of a request.

    ``prompt`` includes ``cached``. With a ``nonce``, it applies only to a row that was written with that nonce.
    ``drafts`` are draft tokens, ``accepted_drafts`` of which are in the completion; they are not billed.
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


_SETTLED_BY = [column for column in ledger.c if column.name != "tags"]  # which may be ten kilobytes
_find = sa.select(*_SETTLED_BY).where(ledger.c.request_id == sa.bindparam("id")).with_for_update()
_close = sa.update(ledger).where(ledger.c.request_id == sa.bindparam("id"))
_scoped = [
    sa.and_(window_table.c.scope == scope, window_table.c.subject == sa.bindparam(scope))
    for scope in ("endpoint", "key", "tenant", "user")
]
_find_windows = (
    sa.select(window_table)
    .where(sa.or_(*_scoped))
    .order_by(window_table.c.scope, window_table.c.subject)
    .with_for_update()
)
_save_window = (
    sa.update(window_table)
    .where(window_table.c.scope == sa.bindparam("in_scope"), window_table.c.subject == sa.bindparam("of_subject"))
    .values(state=sa.bindparam("new_state"))
)


def load_windows(connection: sa.Connection, row: Any) -> dict[tuple[str, str], WindowState]:
    """Lock and return the windows in which a request counts, by (scope, subject).

    ``row`` has the request's key_id, tenant and endpoint.
    """
    found = connection.execute(_find_windows, dict(subjects_of(row)))
    return {(scope, subject): windows.decode(state) for scope, subject, state in found}


def save_windows(connection: sa.Connection, states: dict[tuple[str, str], WindowState]) -> None:
    if states:
        rows = [
            {"in_scope": scope, "of_subject": subject, "new_state": windows.encode(state)}
            for (scope, subject), state in states.items()
        ]
        connection.execute(_save_window, rows)


def settle(connection: sa.Connection, settlement: Settlement) -> bool:
    """Apply ``settlement``; return False if the row is already closed (or unknown), so that nothing changed."""
    found = connection.execute(_find, {"id": settlement.request_id}).mappings().one_or_none()
    if found is None or found["status"] not in ("open", "recovered"):
        return False
    if settlement.nonce not in (None, found["nonce"]):
        return False
    was_open = found["status"] == "open"
    if settlement.status == "recovered":
        settlement = _at_least(settlement, found)
        if not was_open:
            if all(getattr(settlement, name) == found[f"{name}_tokens"] for name in ("prompt", "cached", "completion")):
                return False
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
    }
    connection.execute(_close, {"id": settlement.request_id, **values})
    change = Amounts(
        input=settlement.prompt - before[0],
        output=settlement.completion - before[1],
        in_flight=-1 if was_open else 0,
        money=money - before[2],
    )
    states = load_windows(connection, found)
    for state in states.values():
        windows.charge(state, found["charged_at"], change)
    save_windows(connection, states)
    if found["bucket_milli"]:
        _credit_bucket(connection, f"{found['endpoint']}\n{found['entity']}", found["bucket_milli"] - used_milli)
    return True


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
