"""The content of files: of uploaded ones their chunks, of a batch's files the outputs of its rows.

A batch's files are not written anywhere: each line is stored with its row, in the transaction that ends the row, so a
file has each row once and is complete when the batch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from ..metering.store.store import Store
from ..metering.store.tables import batch_rows, batches
from .files import Files, found_file
from .objects import DONE, EXPIRED, FAILED, request_id_of

ROWS_AT_ONCE = 100
EXPIRED_ERROR = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def content_of(store: Store, file_id: str, tenant: str) -> Iterator[bytes]:
    """Return the content of a file in pieces. Raises ``NotFound`` at once."""
    file = store.read(lambda connection: found_file(connection, file_id, tenant))
    if file.batch_id is None:
        return Files(store).chunks(file_id)
    query = sa.select(batches.c.output_file_id).where(batches.c.id == file.batch_id)
    is_output = store.read(lambda connection: connection.execute(query).scalar_one_or_none()) == file_id
    return _lines(store, file.batch_id, (DONE,) if is_output else (FAILED, EXPIRED))


def _lines(store: Store, batch_id: str, statuses: tuple[str, ...]) -> Iterator[bytes]:
    last = 0
    while True:
        query = sa.select(batch_rows.c.number, batch_rows.c.custom_id, batch_rows.c.status, batch_rows.c.output)
        query = query.where(
            batch_rows.c.batch_id == batch_id, batch_rows.c.number > last, batch_rows.c.status.in_(statuses)
        )
        query = query.order_by(batch_rows.c.number).limit(ROWS_AT_ONCE)
        found = store.read(partial(_rows, query))
        if not found:
            return
        last = found[-1].number
        yield b"".join(_line(batch_id, row) for row in found)


def _rows(query: Any, connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    return connection.execute(query).all()


def _line(batch_id: str, row: sa.Row[Any]) -> bytes:
    return expired_line(batch_id, row.number, row.custom_id) if row.output is None else bytes(row.output)


def expired_line(batch_id: str, number: int, custom_id: str) -> bytes:
    """Return the line of a request that the batch had no time for."""
    line = {"id": request_id_of(batch_id, number), "custom_id": custom_id, "response": None, "error": EXPIRED_ERROR}
    return msgspec.json.encode(line) + b"\n"
