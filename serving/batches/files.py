"""Files of requests in the metering store.

They are in the database, not in a directory, because each of several servers may run a batch, and the database is what
these have in common. Sizes are bounded by ``max_body_bytes`` for a file and ``max_file_storage`` for a tenant. A file
is written chunk by chunk, in transactions that hold up no others, and exists once it is complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..interface.errors import Conflict, InvalidField, LimitExceeded, NotFound
from ..metering.store.store import Store
from ..metering.store.tables import batch_rows, batches, file_chunks, files
from .lines import chunks_of
from .objects import DONE, OPEN, FileObject, file_object

ABANDONED_MS = 3_600_000  # after so long, an upload that is not complete is removed
MAX_TRANSACTION_BYTES = 2**20
DEFAULT_SECONDS = 30 * 86_400  # how long files are kept, as by OpenAI


class Files:
    """The files of a store. Those of other tenants do not exist for a caller."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self, content: bytes, *, tenant: str, key_id: str, filename: str, now_ms: int, seconds: int, maximum: int
    ) -> FileObject:
        """Store a file of requests, kept for ``seconds``. A tenant's files may take ``maximum`` bytes in all.

        Raises ``LimitExceeded``.
        """
        file_id = f"file-{secrets.token_hex(12)}"
        row = {"id": file_id, "tenant": tenant, "key_id": key_id, "filename": filename, "purpose": "batch"}
        row |= {"bytes": len(content), "status": "uploading", "created_ms": now_ms}  # type: ignore[dict-item]
        row["expires_ms"] = now_ms + seconds * 1000  # type: ignore[assignment]

        def begin(connection: sa.Connection) -> None:
            taken = sa.select(sa.func.coalesce(sa.func.sum(files.c.bytes), 0)).where(files.c.tenant == tenant)
            if (used := int(connection.execute(taken).scalar_one())) + len(content) > maximum:
                raise LimitExceeded(
                    f"the files of tenant {tenant} have {used} bytes, and may have {maximum}; delete some",
                    limit="file_storage",
                    retry_after=None,
                )
            connection.execute(sa.insert(files).values(row))

        self._store.write(begin)
        chunks = [{"file_id": file_id, "number": i, "data": chunk} for i, chunk in enumerate(chunks_of(content))]
        for some in _parts(chunks):
            self._store.write(partial(_add, some))
        done = sa.update(files).where(files.c.id == file_id).values(status="processed").returning(*files.c)
        return self._store.write(lambda connection: file_object(connection.execute(done).one()))

    def get(self, file_id: str, tenant: str) -> FileObject:
        """Return a file. Raises ``NotFound``."""
        return file_object(self._store.read(lambda connection: found_file(connection, file_id, tenant)))

    def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, descending: bool
    ) -> list[FileObject]:
        """Return up to ``limit + 1`` files. Raises ``NotFound`` for an ``after`` that does not exist."""
        order = (files.c.created_ms, files.c.id)
        query = sa.select(files).where(files.c.tenant == tenant, files.c.status == "processed")
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)

        def work(connection: sa.Connection) -> list[FileObject]:
            bounded = query
            if after is not None:
                last = found_file(connection, after, tenant)
                bounded = query.where(beyond(order, (last.created_ms, last.id), descending=descending))
            ordered = bounded.order_by(*(column.desc() if descending else column for column in order))
            return [file_object(row) for row in connection.execute(ordered.limit(limit + 1))]

        return self._store.read(work)

    def delete(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises ``NotFound``, and ``Conflict`` for the input of a batch that has not ended."""

        def work(connection: sa.Connection) -> None:
            found = found_file(connection, file_id, tenant)
            if found.batch_id is None:
                using = sa.select(batches.c.id).where(batches.c.input_file_id == file_id)
                batch = connection.execute(using.where(batches.c.status.in_(OPEN)).limit(1)).scalar_one_or_none()
                if batch is not None:
                    raise Conflict(f"file {file_id} is the input of {batch}, which has not ended")
            _remove(found, connection)

        self._store.write(work)

    def chunks(self, file_id: str) -> Iterator[bytes]:
        """Yield the chunks of a file of requests."""
        number = 0
        while True:
            data = self.chunk(file_id, number)
            if data is None:
                return
            yield data
            number += 1

    def chunk(self, file_id: str, number: int) -> bytes | None:
        query = sa.select(file_chunks.c.data).where(file_chunks.c.file_id == file_id, file_chunks.c.number == number)
        data = self._store.read(lambda connection: connection.execute(query).scalar_one_or_none())
        return None if data is None else bytes(data)

    def remove_old(self, now_ms: int) -> int:
        """Remove files whose time is over, unless a batch still reads them, and uploads that were given up. Return how
        many."""
        read = sa.select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
        over = sa.and_(files.c.expires_ms <= now_ms, files.c.id.not_in(read))
        left = sa.and_(files.c.status == "uploading", files.c.created_ms <= now_ms - ABANDONED_MS)
        query = sa.select(files).where(sa.or_(over, left)).limit(100)
        found = self._store.read(lambda connection: connection.execute(query).all())
        for row in found:
            self._store.write(partial(_remove, row))
        return len(found)


def found_file(connection: sa.Connection, file_id: str, tenant: str) -> sa.Row[Any]:
    """Return the row of a complete file. Raises ``NotFound``."""
    query = sa.select(files).where(files.c.id == file_id, files.c.tenant == tenant, files.c.status == "processed")
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"no file has the id {file_id[:80]}", param="file_id")
    return row


def _add(chunks: list[dict[str, Any]], connection: sa.Connection) -> None:
    connection.execute(sa.insert(file_chunks), chunks)


def _remove(file: sa.Row[Any], connection: sa.Connection) -> None:
    """Delete a file, and of one that is made of a batch's rows their outputs."""
    if file.batch_id is not None:
        is_output = sa.select(batches.c.output_file_id == file.id).where(batches.c.id == file.batch_id)
        done = bool(connection.execute(is_output).scalar_one_or_none())
        own = sa.update(batch_rows).where(batch_rows.c.batch_id == file.batch_id)
        own = own.where(batch_rows.c.status == DONE if done else batch_rows.c.status != DONE)
        connection.execute(own.values(output=None))
    connection.execute(sa.delete(files).where(files.c.id == file.id))


def beyond(
    columns: tuple[sa.ColumnElement[Any], ...], values: tuple[Any, ...], *, descending: bool
) -> sa.ColumnElement[bool]:
    """Return the condition of rows that come after those with ``values``."""
    first, second = columns
    if descending:
        return sa.or_(first < values[0], sa.and_(first == values[0], second < values[1]))
    return sa.or_(first > values[0], sa.and_(first == values[0], second > values[1]))


def check_seconds(field: str, seconds: int) -> int:
    """Return a time for which a file is kept. Raises ``InvalidField``."""
    if not 3600 <= seconds <= 2_592_000:
        raise InvalidField(field, seconds, "seconds from 3600 (an hour) to 2592000 (30 days)")
    return seconds


def _parts(chunks: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield chunks in groups of about ``MAX_TRANSACTION_BYTES``."""
    some: list[dict[str, Any]] = []
    size = 0
    for chunk in chunks:
        some.append(chunk)
        size += len(chunk["data"])
        if size >= MAX_TRANSACTION_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
