"""Batches in the metering store: created, shown and cancelled. ``runner`` runs them."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import sqlalchemy as sa

from ..interface.errors import Conflict, InvalidField, LimitExceeded, NotFound
from ..metering.accounts.authorization import Caller
from ..metering.store.store import Store
from ..metering.store.tables import batch_rows, batches
from .files import beyond, found_file
from .objects import DONE, ENDED, EXPIRED, FAILED, OPEN, BatchObject, BatchUsage, RequestCounts, batch_object

MAX_WINDOW_HOURS = 336


class Batches:
    """The batches of a store. Those of other tenants do not exist for a caller."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self,
        caller: Caller,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        output_seconds: int,
        now_ms: int,
        max_open: int,
    ) -> BatchObject:
        """Create a batch, which a server with this store validates and runs.

        A tenant may have ``max_open`` requests in batches that have not ended. Raises ``NotFound`` for the file,
        ``InvalidField``, ``LimitExceeded``.
        """
        batch_id = f"batch_{secrets.token_hex(12)}"
        row: dict[str, Any] = {
            "id": batch_id,
            "tenant": caller.tenant,
            "key_id": caller.key_id,
            "caller": msgspec.json.encode(caller).decode(),
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": completion_window,
            "metadata": None if metadata is None else msgspec.json.encode(metadata).decode(),
            "output_seconds": output_seconds,
            "status": "validating",
            "num_rows": 0,
            "created_ms": now_ms,
            "expires_ms": now_ms + window_seconds(completion_window) * 1000,
        }

        def work(connection: sa.Connection) -> BatchObject:
            file = found_file(connection, input_file_id, caller.tenant)
            if file.batch_id is not None:
                raise InvalidField("input_file_id", input_file_id, 'a file whose purpose is "batch"')
            opened = sa.select(sa.func.coalesce(sa.func.sum(batches.c.num_rows), 0))
            opened = opened.where(batches.c.tenant == caller.tenant, batches.c.status.in_(OPEN))
            if (count := int(connection.execute(opened).scalar_one())) >= max_open:
                raise LimitExceeded(
                    f"tenant {caller.tenant} has {count} requests in batches that have not ended; {max_open} are "
                    "allowed",
                    limit="batch_rows",
                )
            connection.execute(sa.insert(batches).values(row))
            return _shown(connection, _found(connection, batch_id, caller.tenant))

        return self._store.write(work)

    def get(self, batch_id: str, tenant: str) -> BatchObject:
        """Return a batch. Raises ``NotFound``."""
        return self._store.read(lambda connection: _shown(connection, _found(connection, batch_id, tenant)))

    def list(self, tenant: str, *, after: str | None, limit: int) -> list[BatchObject]:
        """Return up to ``limit + 1`` batches, the newest first. Raises ``NotFound`` for an unknown ``after``."""
        order = (batches.c.created_ms, batches.c.id)
        query = sa.select(batches).where(batches.c.tenant == tenant)

        def work(connection: sa.Connection) -> list[BatchObject]:
            bounded = query
            if after is not None:
                last = _found(connection, after, tenant)
                bounded = query.where(beyond(order, (last.created_ms, last.id), descending=True))
            ordered = bounded.order_by(*(column.desc() for column in order)).limit(limit + 1)
            return [_shown(connection, row) for row in connection.execute(ordered).all()]

        return self._store.read(work)

    def cancel(self, batch_id: str, tenant: str, now_ms: int) -> BatchObject:
        """Cancel a batch: what is answered stays. Raises ``NotFound``, and ``Conflict`` for one that has ended."""

        def work(connection: sa.Connection) -> BatchObject:
            row = _found(connection, batch_id, tenant, lock=True)
            if row.status in ENDED:
                raise Conflict(f"batch {batch_id} is {row.status}; it cannot be cancelled any more")
            if row.status != "cancelling":
                own = sa.update(batches).where(batches.c.id == batch_id)
                connection.execute(own.values(status="cancelling", cancelling_ms=now_ms))
            return _shown(connection, _found(connection, batch_id, tenant))

        return self._store.write(work)


def window_seconds(window: str) -> int:
    """Return the seconds of ``24h``. Raises ``InvalidField``."""
    hours = window.removesuffix("h")
    if hours == window or not (hours.isascii() and hours.isdigit()) or len(hours) > 3:
        raise InvalidField("completion_window", window, f"hours such as 24h, from 1h to {MAX_WINDOW_HOURS}h")
    if not 1 <= int(hours) <= MAX_WINDOW_HOURS:
        raise InvalidField("completion_window", window, f"1h to {MAX_WINDOW_HOURS}h")
    return int(hours) * 3600


def _found(connection: sa.Connection, batch_id: str, tenant: str, *, lock: bool = False) -> sa.Row[Any]:
    query = sa.select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise NotFound(f"no batch has the id {batch_id[:80]}", param="batch_id")
    return row


def _shown(connection: sa.Connection, row: sa.Row[Any]) -> BatchObject:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    sums = (sa.func.coalesce(sa.func.sum(batch_rows.c[name]), 0) for name in names)
    query = sa.select(batch_rows.c.status, sa.func.count(), *sums).where(batch_rows.c.batch_id == row.id)
    found = {status: tuple(map(int, rest)) for status, *rest in connection.execute(query.group_by("status"))}
    counts: RequestCounts = {
        "total": row.num_rows,
        "completed": found.get(DONE, (0,))[0],
        "failed": sum(found.get(status, (0,))[0] for status in (FAILED, EXPIRED)),
    }
    prompt, cached, completion = (sum(one[i] for one in found.values()) for i in (1, 2, 3))
    usage: BatchUsage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    return batch_object(row, counts, usage)
