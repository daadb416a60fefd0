"""The payload log: the texts of requests in the store, within the bounds that each endpoint sets.

Every write of an endpoint's rows also deletes the oldest ones beyond its bounds, in the same transaction. A row that
has reached its age is not read any more, and is deleted by ``prune``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import IO, Any

import sqlalchemy as sa
from msgspec import Struct, structs

from ...interface.payload_log import PayloadLog
from ..accounts.audit import Actor, record
from ..store.cursors import number_of
from ..store.store import Store
from ..store.tables import endpoints, payloads

SLACK_DIVISOR = 10
"""A bound that is exceeded is restored with a tenth of it free, so that not every write deletes."""
BATCH_ROWS = 500  # deleted at once
READ_ROWS = 50  # read at once: a row has up to two texts of ``MAX_TEXT`` bytes


class Payload(Struct, frozen=True, kw_only=True):
    """A logged request. A text is None if there is none, or if ``codes`` says why it was left out. ``sample`` is the
    share of the requests that was logged then. ``shadow`` is the answer of a shadow to a copy of the request, under its
    id and without its text. ``model_version`` is that of the registry, such as assistant/3, if it has one."""

    request_id: str
    endpoint: str
    entity: str
    adapter: str | None
    tenant: str
    key_id: str
    client_request_id: str | None
    status_code: int
    started_ms: int
    duration_ms: int
    sample: float
    model_version: str | None = None
    shadow: bool = False
    request: str | None
    response: str | None
    codes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(len(text.encode()) for text in (self.request, self.response) if text is not None)


class Payloads:
    """The payload log of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, rows: Sequence[tuple[Payload, PayloadLog]], now_ms: int, *, timeout: float | None = None) -> None:
        """Add requests with the settings of their endpoints. Those of endpoints that are gone are left out."""

        def work(connection: sa.Connection) -> None:
            names = {row.endpoint for row, _ in rows}
            query = sa.select(endpoints.c.name).where(endpoints.c.name.in_(names))
            known = set(connection.execute(query.with_for_update(read=True)).scalars())
            kept = [(row, settings) for row, settings in rows if row.endpoint in known]
            if not kept:
                return
            values = [_values(row, now_ms + int(settings.max_age * 1000)) for row, settings in kept]
            connection.execute(sa.insert(payloads), values)
            for endpoint, settings in {row.endpoint: settings for row, settings in kept}.items():
                _bound(connection, endpoint, settings)

        self._store.write(work, timeout=timeout)

    def page(
        self, endpoint: str, now_ms: int, *, limit: int, cursor: str | None = None, request_id: str | None = None
    ) -> tuple[tuple[Payload, ...], str | None]:
        """Return a page of an endpoint's requests, the newest first, and the cursor of the next one. Raises
        ``InvalidField``."""
        query = sa.select(payloads).where(payloads.c.endpoint == endpoint, payloads.c.expires_ms > now_ms)
        if request_id is not None:
            query = query.where(payloads.c.request_id == request_id)
        if cursor is not None:
            query = query.where(payloads.c.number < number_of(cursor))
        query = query.order_by(payloads.c.number.desc()).limit(limit + 1)
        found = self._store.read(lambda connection: connection.execute(query).all())
        next_cursor = str(found[limit - 1].number) if len(found) > limit else None
        return tuple(_payload(row) for row in found[:limit]), next_cursor

    def rows(self, endpoint: str, now_ms: int) -> Iterator[Payload]:
        """Yield every request of an endpoint, the newest first, read in pages."""
        cursor = None
        while True:
            page, cursor = self.page(endpoint, now_ms, limit=READ_ROWS, cursor=cursor)
            yield from page
            if cursor is None:
                return

    def logged(self, request_ids: Sequence[str], now_ms: int) -> frozenset[str]:
        """Return those of the requests whose texts are kept."""
        this = sa.and_(payloads.c.request_id.in_(request_ids), payloads.c.expires_ms > now_ms)
        query = sa.select(payloads.c.request_id).where(this)
        return frozenset(self._store.read(lambda connection: connection.execute(query).scalars().all()))

    def delete(self, endpoint: str, *, by: Actor | None = None) -> int:
        """Delete every request of an endpoint and return how many; the audit log says so, without the texts."""

        def work(connection: sa.Connection) -> int:
            gone = connection.execute(sa.delete(payloads).where(payloads.c.endpoint == endpoint)).rowcount
            record(connection, by, "endpoint.delete_payloads", endpoint, before={"payloads": gone})
            return gone

        return self._store.write(work)

    def prune(self, now_ms: int) -> int:
        """Delete the requests that have reached their age, of all endpoints, and return how many."""
        old = payloads.c.expires_ms <= now_ms
        query = sa.select(payloads.c.number).where(old).limit(BATCH_ROWS)
        total = 0
        while found := self._store.read(lambda connection: connection.execute(query).scalars().all()):
            gone = sa.delete(payloads).where(payloads.c.number.in_(found))
            self._store.write(lambda connection, gone=gone: connection.execute(gone))  # type: ignore[misc]
            total += len(found)
        return total


def _values(row: Payload, expires_ms: int) -> dict[str, Any]:
    return structs.asdict(row) | {"codes": " ".join(row.codes), "size": row.size, "expires_ms": expires_ms}


def _payload(row: sa.Row) -> Payload:
    fields = {name: getattr(row, name) for name in Payload.__struct_fields__}
    return Payload(**fields | {"codes": tuple(row.codes.split())})


def _bound(connection: sa.Connection, endpoint: str, settings: PayloadLog) -> None:
    """Delete the oldest rows of an endpoint if there are too many, or too large ones."""
    this = payloads.c.endpoint == endpoint
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(payloads.c.size), 0)).where(this)
    rows, size = connection.execute(query).one()
    if rows <= settings.max_rows and size <= settings.max_bytes:
        return
    newest = payloads.c.number.desc()
    ranked = (
        sa.select(
            payloads.c.number,
            sa.func.row_number().over(order_by=newest).label("place"),
            sa.func.sum(payloads.c.size).over(order_by=newest).label("held"),
        )
        .where(this)
        .subquery()
    )
    most_rows, most_bytes = (most - most // SLACK_DIVISOR for most in (settings.max_rows, settings.max_bytes))
    beyond = sa.or_(ranked.c.place > most_rows, ranked.c.held > most_bytes)
    connection.execute(sa.delete(payloads).where(payloads.c.number.in_(sa.select(ranked.c.number).where(beyond))))


def write_parquet(rows: Iterator[Payload], target: str | IO[bytes]) -> int:
    """Write requests as Parquet, in the columns of Databricks' inference tables, and return how many."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("request_date", pa.date32()),
            ("databricks_request_id", pa.string()),
            ("client_request_id", pa.string()),
            ("request_time", pa.timestamp("ms", tz="UTC")),
            ("status_code", pa.int32()),
            ("sampling_fraction", pa.float64()),
            ("execution_duration_ms", pa.int64()),
            ("request", pa.string()),
            ("response", pa.string()),
            ("served_entity_id", pa.string()),
            ("logging_error_codes", pa.list_(pa.string())),
            ("requester", pa.string()),
            ("model_version", pa.string()),
            ("shadow", pa.bool_()),
        ]
    )
    total = 0
    with pq.ParquetWriter(target, schema) as writer:
        while batch := list(itertools.islice(rows, READ_ROWS)):
            columns = {
                "request_date": [row.started_ms // 86_400_000 for row in batch],
                "databricks_request_id": [row.request_id for row in batch],
                "client_request_id": [row.client_request_id for row in batch],
                "request_time": [row.started_ms for row in batch],
                "status_code": [row.status_code for row in batch],
                "sampling_fraction": [row.sample for row in batch],
                "execution_duration_ms": [row.duration_ms for row in batch],
                "request": [row.request for row in batch],
                "response": [row.response for row in batch],
                "served_entity_id": [row.entity for row in batch],
                "logging_error_codes": [list(row.codes) for row in batch],
                "requester": [row.key_id for row in batch],
                "model_version": [row.model_version for row in batch],
                "shadow": [row.shadow for row in batch],
            }
            writer.write_table(pa.table(columns, schema=schema))
            total += len(batch)
    return total
