"""The contents of adapters that are loaded at run time, by their hashes, in the store that all hosts reach.

They are files of the store (``files``, ``file_chunks``) that belong to no tenant: a row whose ``filename`` is the hash,
and the content in parts (``model_files.adapter_contents``), of which each is written in a transaction of its own. A
content exists once it is complete. One that no adapter has any more is removed some minutes later.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial

import sqlalchemy as sa

from ..interface.errors import LimitExceeded, PackagingError
from ..metering.store.store import Store
from ..metering.store.tables import endpoint_adapters, file_chunks, files
from ..model_files.adapter_contents import AdapterContent

PURPOSE = "adapter"
KEEP_MS = 600_000
"""How long a content without an adapter stays: a load that engines refuse puts the adapter of before back."""
ABANDONED_MS = 3_600_000
_LOCK = 0x6D6C6C61  # the key of PostgreSQL's advisory lock, an arbitrary constant


class AdapterContents:
    """The contents of a store. ``clock`` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock

    def put(self, content: AdapterContent, parts: Iterator[bytes], *, maximum: int, key_id: str = "") -> None:
        """Store a content, unless it is there: ``parts`` are its bytes. All contents may take ``maximum`` bytes.

        Raises ``LimitExceeded``, and ``PackagingError`` if ``parts`` are not those of ``content``.
        """
        name, now = content.content_hash, self._now_ms()
        if self._store.write(lambda connection: touch(connection, name, now)):
            return
        file_id = f"adapter-{secrets.token_hex(12)}"
        self._store.write(partial(self._begin, file_id=file_id, content=content, maximum=maximum, key_id=key_id))
        self._add(file_id, 0, content.described)
        for number, part in enumerate(_checked(content, parts), 1):
            self._add(file_id, number, part)
        self._store.write(partial(self._finish, file_id=file_id, name=name))

    def _begin(
        self, connection: sa.Connection, *, file_id: str, content: AdapterContent, maximum: int, key_id: str
    ) -> None:
        self._lock(connection)
        taken = sa.select(sa.func.coalesce(sa.func.sum(files.c.bytes), 0)).where(files.c.purpose == PURPOSE)
        if (used := int(connection.execute(taken).scalar_one())) + content.num_bytes > maximum:
            raise LimitExceeded(
                f"the adapters in the database have {used} bytes and this one {content.num_bytes}; max_adapter_storage "
                f"allows {maximum}. Those that were unloaded leave after some minutes",
                limit="adapter_storage",
                retry_after=None,
            )
        row = {"id": file_id, "tenant": "", "key_id": key_id, "filename": content.content_hash, "purpose": PURPOSE}
        values = {"bytes": content.num_bytes, "status": "uploading", "created_ms": self._now_ms()}
        connection.execute(sa.insert(files).values(**row, **values))

    def _add(self, file_id: str, number: int, data: bytes) -> None:
        row = {"file_id": file_id, "number": number, "data": data}
        self._store.write(lambda connection: connection.execute(sa.insert(file_chunks).values(**row)))

    def _finish(self, connection: sa.Connection, *, file_id: str, name: str) -> None:
        self._lock(connection)
        if touch(connection, name, self._now_ms()):  # another upload of the same was faster
            connection.execute(sa.delete(files).where(files.c.id == file_id))
            return
        values = {"status": "processed", "created_ms": self._now_ms()}
        connection.execute(sa.update(files).where(files.c.id == file_id).values(**values))

    def _lock(self, connection: sa.Connection) -> None:
        """Have uploads begin and end one after another. SQLite has one writer anyway."""
        if not self._store.is_sqlite:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))

    def part(self, content_hash: str, number: int) -> bytes | None:
        """Return a part of a content, None if there is none (``model_files.adapter_contents.Read``)."""
        whole = sa.and_(_is(content_hash), file_chunks.c.number == number)
        query = sa.select(file_chunks.c.data).join(files, files.c.id == file_chunks.c.file_id).where(whole)
        data = self._store.read(lambda connection: connection.execute(query.limit(1)).scalar_one_or_none())
        return None if data is None else bytes(data)

    def used(self) -> frozenset[str]:
        """Return the hashes of the adapters that are loaded."""
        query = sa.select(endpoint_adapters.c.content_hash).distinct()
        return frozenset(self._store.read(lambda connection: connection.execute(query).scalars().all())) - {""}

    def prune(self) -> int:
        """Remove one content that no adapter has had for a while, or an upload that was given up; return how many."""
        now = self._now_ms()
        used = sa.select(endpoint_adapters.c.content_hash)
        over = sa.or_(
            sa.and_(files.c.created_ms <= now - KEEP_MS, files.c.status != "uploading", files.c.filename.not_in(used)),
            sa.and_(files.c.created_ms <= now - ABANDONED_MS, files.c.status == "uploading"),
        )
        over = sa.and_(files.c.purpose == PURPOSE, over)
        query = sa.select(files.c.id).where(over).limit(1)
        found = self._store.read(lambda connection: connection.execute(query).scalar_one_or_none())
        if found is None:
            return 0
        this = sa.and_(files.c.id == found, over)  # again: an adapter may have been loaded since
        return self._store.write(lambda connection: connection.execute(sa.delete(files).where(this)).rowcount)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def touch(connection: sa.Connection, content_hash: str, now_ms: int) -> bool:
    """Keep a content for some more minutes, if it is there; return whether it is."""
    found = sa.update(files).where(_is(content_hash)).values(created_ms=now_ms)
    return bool(connection.execute(found).rowcount)


def _is(content_hash: str) -> sa.ColumnElement[bool]:
    return sa.and_(files.c.filename == content_hash, files.c.purpose == PURPOSE, files.c.status == "processed")


def _checked(content: AdapterContent, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield ``parts``. Raises ``PackagingError`` if they are not the bytes of ``content``."""
    for file in content.files:
        left, found = file.size, hashlib.sha256()
        while left:
            part = next(parts)
            left -= len(part)
            found.update(part)
            yield part
        if found.hexdigest() != file.sha256:
            raise PackagingError("its files changed while they were read; try again")
