"""The rows of batches: claimed by a process, answered once, and given back when the process ends.

::

    pending ─► running ─► completed | failed        in the transaction that bills the row
    running ─► pending                              refused for the moment, or its process ended
    pending ─► expired                              when the batch expires

A claim is held as long as its process is among the ``owners`` of leases; crash recovery removes it from there
(``metering.ledger.crash_recovery``), and no clock decides. ``attempt`` tells a claim from the next one of its row: a
process that was taken for dead cannot store a reply any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..metering.ledger.settlement import Settlement, settle
from ..metering.store.store import Store
from ..metering.store.tables import batch_rows, batches, file_chunks, owners
from .lines import Line
from .objects import DONE, PENDING, RUNNING, request_id_of

INSERTED_AT_ONCE = 1000  # rows per transaction


class ClaimedRow(Struct, frozen=True, kw_only=True):
    """A row that a process runs: ``line`` is that of the input; ``crashes`` counts the processes that ended with it."""

    batch_id: str
    number: int
    custom_id: str
    attempt: int
    crashes: int
    line: bytes

    @property
    def request_id(self) -> str:
        """The id of the row's request, the same in each attempt."""
        return request_id_of(self.batch_id, self.number)


class Rows:
    """The rows of all batches of a store, as ``owner`` claims and answers them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def insert(self, batch_id: str, lines: list[Line]) -> None:
        """Write the rows of a batch; those that exist stay, as after a process ended in the middle."""
        for start in range(0, len(lines), INSERTED_AT_ONCE):
            values = [_row(batch_id, line) for line in lines[start : start + INSERTED_AT_ONCE]]
            insert = self._store.insert(batch_rows).on_conflict_do_nothing()
            self._store.write(partial(_insert, insert, values))

    def claim(self, batch_id: str, owner: str, maximum: int, now_ms: int) -> list[ClaimedRow]:
        """Claim up to ``maximum`` pending rows of a batch that is in progress, in the order of the input."""
        query = sa.select(batch_rows).where(
            batch_rows.c.batch_id == batch_id, batch_rows.c.status == PENDING, batch_rows.c.retry_ms <= now_ms
        )
        query = query.order_by(batch_rows.c.number).limit(maximum).with_for_update(skip_locked=True)
        running = sa.select(batches.c.input_file_id).where(batches.c.id == batch_id, batches.c.status == "in_progress")
        alive = sa.select(owners.c.owner).where(owners.c.owner == owner)

        def work(connection: sa.Connection) -> list[ClaimedRow]:
            file_id = connection.execute(running.with_for_update(read=True)).scalar_one_or_none()
            if file_id is None or connection.execute(alive).one_or_none() is None:
                return []
            found = connection.execute(query).all()
            if found:
                own = sa.update(batch_rows).where(
                    batch_rows.c.batch_id == batch_id, batch_rows.c.number.in_([row.number for row in found])
                )
                connection.execute(own.values(status=RUNNING, claimed_by=owner, attempt=batch_rows.c.attempt + 1))
            chunks = _chunks(connection, file_id, {row.chunk for row in found})
            return [_claimed(row, chunks[row.chunk]) for row in found]

        return self._store.write(work)

    def finish(
        self,
        row: ClaimedRow,
        owner: str,
        status: str,
        *,
        output: bytes | None = None,
        settlement: Settlement | None = None,
        retry_ms: int = 0,
    ) -> bool:
        """Store the outcome of a row and bill it, in one transaction. ``status`` is done, failed, or pending again.

        Only a row that is done is billed. Return False if the claim was lost: then another process answers the row,
        and this attempt costs nothing.
        """
        own = sa.update(batch_rows).where(
            batch_rows.c.batch_id == row.batch_id,
            batch_rows.c.number == row.number,
            batch_rows.c.status == RUNNING,
            batch_rows.c.claimed_by == owner,
            batch_rows.c.attempt == row.attempt,
        )
        values: dict[str, Any] = {"status": status, "claimed_by": None, "retry_ms": retry_ms}
        if output is not None:
            values |= {"output": output, "output_bytes": len(output)}
        if status == DONE and settlement is not None:
            values |= {"prompt_tokens": settlement.prompt, "cached_tokens": settlement.cached}
            values["completion_tokens"] = settlement.completion

        def work(connection: sa.Connection) -> bool:
            is_ours = connection.execute(own.values(values)).rowcount == 1
            if settlement is not None:
                settle(connection, settlement if is_ours and status == DONE else _of_nothing(settlement))
            return is_ours

        return self._store.write(work)

    def free_dead(self) -> int:
        """Give back the rows of processes that have ended, and return their number."""
        lost = sa.and_(
            batch_rows.c.batch_id.in_(
                sa.select(batches.c.id).where(batches.c.status.in_(("in_progress", "cancelling")))
            ),
            batch_rows.c.status == RUNNING,
            batch_rows.c.claimed_by.not_in(sa.select(owners.c.owner)),
        )
        if not self._store.read(lambda connection: connection.execute(sa.select(sa.exists().where(lost))).scalar_one()):
            return 0
        free = (
            sa.update(batch_rows).where(lost).values(status=PENDING, claimed_by=None, crashes=batch_rows.c.crashes + 1)
        )
        return self._store.write(lambda connection: connection.execute(free).rowcount)

    def has(self, batch_id: str, *statuses: str) -> bool:
        """Return whether a batch has a row of one of ``statuses``."""
        return self._store.read(lambda connection: has_rows(connection, batch_id, *statuses))


def has_rows(connection: sa.Connection, batch_id: str, *statuses: str) -> bool:
    """Return whether a batch has a row of one of ``statuses``."""
    found = sa.exists().where(batch_rows.c.batch_id == batch_id, batch_rows.c.status.in_(statuses))
    return bool(connection.execute(sa.select(found)).scalar_one())


def _insert(insert: Any, values: list[dict[str, Any]], connection: sa.Connection) -> None:
    connection.execute(insert, values)


def _row(batch_id: str, line: Line) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "number": line.number,
        "custom_id": line.custom_id,
        "chunk": line.chunk,
        "start": line.start,
        "size": line.size,
        "status": PENDING,
        **dict.fromkeys(("attempt", "crashes", "retry_ms", "output_bytes"), 0),
        **dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0),
    }


def _chunks(connection: sa.Connection, file_id: str, numbers: Iterable[int]) -> dict[int, bytes]:
    query = sa.select(file_chunks.c.number, file_chunks.c.data).where(
        file_chunks.c.file_id == file_id, file_chunks.c.number.in_(list(numbers))
    )
    return {number: bytes(data) for number, data in connection.execute(query)}


def _claimed(row: sa.Row[Any], chunk: bytes) -> ClaimedRow:
    return ClaimedRow(
        batch_id=row.batch_id,
        number=row.number,
        custom_id=row.custom_id,
        attempt=row.attempt + 1,
        crashes=row.crashes,
        line=chunk[row.start : row.start + row.size],
    )


def _of_nothing(settlement: Settlement) -> Settlement:
    """Return the settlement of an attempt that gave no reply: it costs nothing."""
    status = "error" if settlement.status == "ok" else settlement.status
    return msgspec.structs.replace(
        settlement, prompt=0, cached=0, completion=0, finish_reason="error", status=status, drafts=0, accepted_drafts=0
    )
