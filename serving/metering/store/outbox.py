"""Events on their way to webhooks: written in the transaction of what they tell of, and kept until they are delivered.

Each URL has a row of its own, so that one that does not answer holds up no other. A row is sent at least once, with the
same id each time.
"""

from __future__ import annotations

import datetime
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from .store import Store
from .tables import webhook_deliveries

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # deliveries of all URLs; beyond it, the oldest are given up


class Delivery(Struct, frozen=True, kw_only=True):
    """An event for a URL. ``body`` is JSON with the ``id``, by which repetitions are known; ``attempts`` failed."""

    id: str
    url: str
    at_ms: int
    type: str
    body: str
    attempts: int


class EventOutbox:
    """The deliveries that wait in a store, for the webhooks at ``urls``."""

    def __init__(self, store: Store, urls: tuple[str, ...], *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._urls, self._clock = store, urls, clock

    @property
    def has_webhooks(self) -> bool:
        return bool(self._urls)

    def put(self, connection: sa.Connection, type: str, data: Mapping[str, Any]) -> None:
        """Add an event in the transaction of what it tells of; nothing if there are no webhooks."""
        if not self._urls:
            return
        now, number = self._clock(), uuid.uuid4().hex
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="milliseconds")
        body = msgspec.json.encode({"id": number, "type": type, "timestamp": moment, "data": data}).decode()
        row = {"id": number, "at_ms": int(now * 1000), "type": type, "body": body, "attempts": 0}
        row["due_ms"] = row["at_ms"]
        connection.execute(sa.insert(webhook_deliveries), [row | {"url": url} for url in self._urls])
        self._bound(connection)

    def _bound(self, connection: sa.Connection) -> None:
        table = webhook_deliveries.c
        count = connection.execute(sa.select(sa.func.count()).select_from(webhook_deliveries)).scalar_one()
        if count > MAX_WAITING:
            oldest = sa.select(table.id).order_by(table.at_ms, table.id).limit(count - MAX_WAITING)
            found = set(connection.execute(oldest).scalars())
            connection.execute(sa.delete(webhook_deliveries).where(table.id.in_(found)))
            logger.warning("%d events were given up: %d wait for webhooks that do not answer", len(found), MAX_WAITING)

    def due(self, limit: int) -> tuple[Delivery, ...]:
        """Return the deliveries that are due, the oldest first."""
        table = webhook_deliveries.c
        query = sa.select(*(table[name] for name in Delivery.__struct_fields__))
        query = query.where(table.due_ms <= self._clock() * 1000).order_by(table.at_ms, table.id).limit(limit)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return tuple(Delivery(**row._mapping) for row in rows)

    def remove(self, delivery: Delivery) -> None:
        """Remove a delivery that was made, or that is given up."""
        self._store.write(lambda connection: connection.execute(sa.delete(webhook_deliveries).where(_is(delivery))))

    def postpone(self, delivery: Delivery, seconds: float) -> None:
        """Record a failed attempt; the next one is due in ``seconds``."""
        values = {"attempts": delivery.attempts + 1, "due_ms": int((self._clock() + seconds) * 1000)}
        statement = sa.update(webhook_deliveries).where(_is(delivery)).values(**values)
        self._store.write(lambda connection: connection.execute(statement))


def _is(delivery: Delivery) -> sa.ColumnElement[bool]:
    table = webhook_deliveries.c
    return sa.and_(table.id == delivery.id, table.url == delivery.url)
