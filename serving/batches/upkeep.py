"""Upkeep of batches: each is validated, ended when its rows are, expired or cancelled. Safe in several processes."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..metering.accounts.authorization import Caller
from ..metering.store.store import Store
from ..metering.store.tables import batch_rows, batches, files, owners
from .contents import expired_line
from .files import Files
from .lines import Refused, lines_of
from .objects import DONE, EXPIRED, FAILED, OPEN, PENDING, RUNNING
from .rows import Rows, has_rows


class ActiveBatch(Struct, frozen=True, kw_only=True):
    """A batch that has not ended."""

    id: str
    tenant: str
    caller: Caller
    endpoint: str
    input_file_id: str
    status: str
    expires_ms: int


class Upkeep:
    """The life of the batches of a store, as far as it is not in their rows. A batch has up to ``maximum`` rows."""

    def __init__(self, store: Store, maximum: int) -> None:
        self._store, self._maximum = store, maximum
        self._rows = Rows(store)

    def active(self) -> list[ActiveBatch]:
        """Return the batches that have not ended, the oldest first."""
        query = sa.select(batches).where(batches.c.status.in_(OPEN)).order_by(batches.c.created_ms, batches.c.id)
        return [_active(row) for row in self._store.read(lambda connection: connection.execute(query).all())]

    def validate(self, batch: ActiveBatch, owner: str, now_ms: int) -> bool:
        """Check the input of a batch and write its rows. Return False if another process does."""
        if not self._claim(batch.id, owner):
            return False
        try:
            lines = lines_of(Files(self._store).chunks(batch.input_file_id), batch.endpoint, self._maximum)
        except Refused as refused:
            errors = msgspec.json.encode(refused.errors).decode()
            self._set(batch.id, "validating", status="failed", errors=errors, failed_ms=now_ms)
            return True
        self._rows.insert(batch.id, lines)
        self._set(batch.id, "validating", status="in_progress", num_rows=len(lines), in_progress_ms=now_ms)
        return True

    def end(self, batch: ActiveBatch, status: str, now_ms: int) -> bool:
        """End a batch of which no row runs: make its files, and give it its last status.

        Return False if a row runs, or another process has ended it.
        """

        def work(connection: sa.Connection) -> bool:
            query = sa.select(batches).where(batches.c.id == batch.id).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None or row.status != batch.status or has_rows(connection, batch.id, RUNNING):
                return False
            if status == "completed" and has_rows(connection, batch.id, PENDING):
                return False
            if status == "expired":
                pending = sa.update(batch_rows).where(batch_rows.c.batch_id == batch.id, batch_rows.c.status == PENDING)
                connection.execute(pending.values(status=EXPIRED))
            values: dict[str, Any] = {"status": status, "finalizing_ms": now_ms, f"{status}_ms": now_ms}
            for name, kinds in (("output_file_id", (DONE,)), ("error_file_id", (FAILED, EXPIRED))):
                values[name] = _make_file(connection, row, name, kinds, now_ms)
            connection.execute(sa.update(batches).where(batches.c.id == batch.id).values(values))
            return True

        return self._store.write(work)

    def _claim(self, batch_id: str, owner: str) -> bool:
        """Return whether this process validates the batch from now on."""
        dead = batches.c.claimed_by.not_in(sa.select(owners.c.owner))
        own = sa.update(batches).where(
            batches.c.id == batch_id,
            batches.c.status == "validating",
            sa.or_(batches.c.claimed_by.is_(None), batches.c.claimed_by == owner, dead),
        )
        return self._store.write(lambda connection: connection.execute(own.values(claimed_by=owner)).rowcount) == 1

    def _set(self, batch_id: str, before: str, **values: Any) -> None:
        """Change a batch whose status is still ``before``."""
        own = sa.update(batches).where(batches.c.id == batch_id, batches.c.status == before)
        self._store.write(lambda connection: connection.execute(own.values(claimed_by=None, **values)))


def _make_file(
    connection: sa.Connection, batch: sa.Row[Any], name: str, statuses: tuple[str, ...], now_ms: int
) -> str | None:
    """Return the id of a new file of the batch's rows with one of ``statuses``; None if there are no such rows."""
    which = sa.and_(batch_rows.c.batch_id == batch.id, batch_rows.c.status.in_(statuses))
    count, size = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(batch_rows.c.output_bytes), 0)).where(which)
    ).one()
    if not count:
        return None
    late = sa.select(batch_rows.c.number, batch_rows.c.custom_id).where(which, batch_rows.c.output.is_(None))
    size += sum(len(expired_line(batch.id, number, custom_id)) for number, custom_id in connection.execute(late))
    file_id = f"file-{secrets.token_hex(12)}"
    row = {
        "id": file_id,
        "tenant": batch.tenant,
        "key_id": batch.key_id,
        "filename": f"{batch.id}_{'output' if name == 'output_file_id' else 'error'}.jsonl",
        "purpose": "batch_output",
        "bytes": int(size),
        "status": "processed",
        "created_ms": now_ms,
        "expires_ms": now_ms + batch.output_seconds * 1000,
        "batch_id": batch.id,
    }
    connection.execute(sa.insert(files).values(row))
    return file_id


def _active(row: sa.Row[Any]) -> ActiveBatch:
    return ActiveBatch(
        id=row.id,
        tenant=row.tenant,
        caller=msgspec.json.decode(row.caller, type=Caller),
        endpoint=row.endpoint,
        input_file_id=row.input_file_id,
        status=row.status,
        expires_ms=row.expires_ms,
    )
