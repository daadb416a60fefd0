"""Prices of served entities, each with the time from which it is in effect."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import sqlalchemy as sa

from ...interface.canary import base_name
from ...interface.errors import InvalidField
from ...model_files.model_version import ModelVersion
from ..store.group_commit import GroupCommit
from ..store.store import Store
from ..store.tables import prices
from .audit import Actor, record
from .money import FREE, Price, units

CACHE_SECONDS = 2.0
BATCH = "batch:"
"""It stands before the name by which the price of batches is set."""
ANY = "*"
"""The entity whose price holds for every entity without one of its own."""


def price_names(entity: str, model: ModelVersion, endpoint: str, *, background: bool = False) -> tuple[str, ...]:
    """Return the names that the price of a request may be set by, the closest first.

    They are the served entity (for a canary also the one it is of), what a command line asked for, the registered
    version (``assistant/3``), the registered model (``assistant``), and the endpoint: a model has a name whichever way
    it was served. For a request of a batch, each of them with ``BATCH`` before it, and that of all models, come first
    (``batch:assistant``, ``batch:*``).
    """
    known = (entity, base_name(entity), model.asked, model.label, model.name, endpoint)
    names = tuple(name for name in known if name)
    if not background:
        return names
    return (*(f"{BATCH}{name}" for name in (*names, ANY)), *names)


class Prices:
    """The price list of a store. A request pays the price in effect when it was admitted."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._readers: GroupCommit[tuple[str, ...], None] = GroupCommit(self._refresh)
        self._cache: dict[str, tuple[float, tuple[tuple[int, Price], ...]]] = {}

    def set(self, entity: str, price: Price, *, effective: float | None = None, by: Actor | None = None) -> int:
        """Set the price of ``entity`` from ``effective`` on and return that time in ms since the epoch.

        ``effective`` is in seconds since the epoch; None is now. It must not be in the past: admitted requests keep
        their price. A price from now on reaches the other processes within ``CACHE_SECONDS``. Raises ``InvalidField``.
        """
        now = self._clock()
        at = now if effective is None else effective
        if not entity or len(entity) > 256 or "\0" in entity:
            raise InvalidField("entity", entity, "a name of 1 to 256 characters")
        if at < now - 1:
            shown = datetime.fromtimestamp(at, UTC).isoformat()
            raise InvalidField("effective", shown, "a time that is not in the past")
        values = {
            "input": price.input,
            "cached": price.cached,
            "output": price.output,
            "unit_minute": price.unit_minute,
        }
        insert = self._store.insert(prices).values(entity=entity, effective_ms=int(at * 1000), **values)
        statement = insert.on_conflict_do_update(index_elements=["entity", "effective_ms"], set_=values)
        until = sa.select(prices).where(prices.c.entity == entity, prices.c.effective_ms <= int(at * 1000))

        def work(connection: sa.Connection) -> None:
            before = connection.execute(until.order_by(prices.c.effective_ms.desc()).limit(1)).one_or_none()
            connection.execute(statement)
            after = {"effective_ms": int(at * 1000), **plain(price)}
            was = None if before is None else {"effective_ms": before.effective_ms, **plain(_price(before))}
            record(connection, by, "price.set", entity, before=was, after=after)

        self._store.write(work)
        self._forget(entity)
        return int(at * 1000)

    def remove(
        self, entity: str, *, effective_ms: int | None = None, by: Actor | None = None
    ) -> tuple[tuple[int, Price], ...]:
        """Remove all prices of ``entity``, or the one that takes effect at ``effective_ms``; return those removed.

        Each is ``(effective_ms, price)``. Admitted requests keep their price.
        """
        which = prices.c.entity == entity
        if effective_ms is not None:
            which = sa.and_(which, prices.c.effective_ms == effective_ms)

        def work(connection: sa.Connection) -> tuple[tuple[int, Price], ...]:
            rows = connection.execute(sa.select(prices).where(which).order_by(prices.c.effective_ms)).all()
            found = tuple((int(row.effective_ms), _price(row)) for row in rows)
            if found:
                connection.execute(sa.delete(prices).where(which))
                before = [{"effective_ms": at_ms, **plain(price)} for at_ms, price in found]
                record(connection, by, "price.delete", entity, before=before)
            return found

        removed = self._store.write(work)
        self._forget(entity)
        return removed

    def at(self, names: str | Iterable[str], when: float) -> Price:
        """Return the price at ``when`` of the first of ``names`` that has one; else the price of ``"*"``, else zero."""
        asked = (*((names,) if isinstance(names, str) else filter(None, names)), ANY)
        for found in self._of(asked):
            for effective_ms, price in found:
                if effective_ms <= when * 1000:
                    return price
        return FREE

    def _of(self, entities: tuple[str, ...]) -> list[tuple[tuple[int, Price], ...]]:
        """Return the prices of each entity, newest first."""
        if self._old(entities):
            self._readers("", entities)
        return [self._cache[one][1] for one in entities]

    def _forget(self, entity: str) -> None:
        """Have the prices of ``entity`` read again; who is about to use the known ones still does."""
        if (known := self._cache.get(entity)) is not None:
            self._cache[entity] = (-math.inf, known[1])

    def _old(self, entities: Iterable[str]) -> list[str]:
        now, cache = time.monotonic(), self._cache
        return [one for one in dict.fromkeys(entities) if one not in cache or now - cache[one][0] >= CACHE_SECONDS]

    def _refresh(self, asked: Sequence[tuple[str, ...]]) -> list[None]:
        """Read the prices of all that is asked and not known, in one query; the callers wait for one of them."""
        old = self._old(entity for entities in asked for entity in entities)
        if old:
            query = sa.select(prices).where(prices.c.entity.in_(old)).order_by(prices.c.effective_ms.desc())
            found: dict[str, list[tuple[int, Price]]] = {one: [] for one in old}
            for row in self._store.read(lambda connection: connection.execute(query).all(), timeout=2.0):
                found[row.entity].append((int(row.effective_ms), _price(row)))
            self._cache |= {one: (time.monotonic(), tuple(each)) for one, each in found.items()}
        return [None] * len(asked)

    def list(self) -> tuple[tuple[str, int, Price], ...]:
        """Return (entity, effective_ms, price) tuples, sorted by entity and time."""
        query = sa.select(prices).order_by(prices.c.entity, prices.c.effective_ms)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return tuple((row.entity, int(row.effective_ms), _price(row)) for row in rows)


def plain(price: Price) -> dict[str, str]:
    """Return a price in the API's form: currency units per million tokens; ``unit_minute`` per provisioned token/s."""
    return {name: units(getattr(price, name)) for name in Price.__struct_fields__}


def _price(row: sa.Row) -> Price:
    return Price(input=int(row.input), cached=int(row.cached), output=int(row.output), unit_minute=int(row.unit_minute))
