"""Retention: fold old rows into sums by day, which keeps the ledger small and every total the same."""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from ...interface.errors import InvalidField
from ..proof.chain import extend, link_folded, lock
from ..store.store import Store
from ..store.tables import folded, ledger

MIN_DAYS = 32
"""A month's budget and all shorter windows are counted by rows: they are kept for so long."""
DAY_MS = 86_400_000
BATCH_ROWS = 2000
"""Rows a transaction: some ten milliseconds of the store's write lock."""

COUNTS = (
    "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "generated_tokens", "draft_tokens",
    "accepted_draft_tokens", "cost",
)  # fmt: skip
GROUP_COLUMNS = ("day", "key_id", "tenant", "endpoint", "entity", "mode", "task", "status")


def fold(store: Store, days: int, *, clock: Callable[[], float] = time.time) -> int:
    """Fold every closed row that started more than ``days`` days ago, and return how many. Raises ``InvalidField``.

    It may be interrupted and repeated at any time, and run beside a server.
    """
    if not isinstance(days, int) or isinstance(days, bool) or days < MIN_DAYS:
        raise InvalidField("days", days, f"an integer from {MIN_DAYS}: a month's budget is counted by rows")
    before = int(clock() * 1000) - days * DAY_MS
    total, now_ms = 0, int(clock() * 1000)
    while extend(store, now_ms, wait=True):  # only rows with links are folded, so that these remain of them
        pass
    while count := store.write(lambda connection: _fold_batch(store, connection, before, now_ms)):
        total += count
    return total


def _fold_batch(store: Store, connection: sa.Connection, before: int, now_ms: int) -> int:
    lock(store, connection)
    store.lock_ledger(connection)  # since windows are rebuilt from rows and folded days together
    old = sa.and_(ledger.c.started_ms < before, ledger.c.status != "open", ledger.c.chained.is_not(None))
    order = (ledger.c.started_ms, ledger.c.request_id)
    batch = sa.select(*order).where(old).order_by(*order).limit(BATCH_ROWS).subquery()
    chosen = sa.and_(old, ledger.c.request_id.in_(sa.select(batch.c.request_id)))
    day = ledger.c.started_ms // DAY_MS
    sums = [sa.func.count(), *(sa.func.sum(ledger.c[name]) for name in COUNTS[1:])]
    groups = [day, *(ledger.c[name] for name in GROUP_COLUMNS[1:])]
    found = connection.execute(sa.select(*groups, *sums).where(chosen).group_by(*groups)).all()
    if not found:
        return 0
    insert = store.insert(folded)
    added = {name: folded.c[name] + insert.excluded[name] for name in COUNTS}
    rows = [
        dict(
            zip(GROUP_COLUMNS + COUNTS, (*row[: len(GROUP_COLUMNS)], *map(int, row[len(GROUP_COLUMNS) :])), strict=True)
        )
        for row in found
    ]
    connection.execute(insert.on_conflict_do_update(index_elements=list(GROUP_COLUMNS), set_=added), rows)
    link_folded(connection, store, sa.select(ledger.c.request_id).where(chosen), now_ms)
    return connection.execute(sa.delete(ledger).where(chosen)).rowcount
