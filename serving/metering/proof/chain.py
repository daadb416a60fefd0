"""The hash chain of the ledger: a link for each settled row, in which each link has the hash of the one before.

Settlements never wait for it. Upkeep of any process links what is settled and not linked yet, in batches: one holder
at a time, in one transaction with the rows' own mark (``ledger.chained``), so that a kill leaves all of a batch or
nothing. The last link of each batch is signed.

A row gets another link where it changes by right: a recovered row whose exact counts arrive later, and times that
``windows repair`` moved. Days that are folded keep the links of their rows, and a link of their own over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from ..store.statements import insert_rows, update_rows
from ..store.store import Store
from ..store.tables import ledger, links
from .canonical import digest, row_hash
from .keys import ProofKeys, make_keys

BATCH_ROWS = 100
"""Rows a transaction: some ten milliseconds of the store's write lock."""
TIMEOUT_SECONDS = 2.0
GENESIS = "0" * 64
"""The first link's hash of the one before."""
FOLDED, REPAIRED = "folded", "repaired"
_LOCK = 0x6D6C6C63  # the key of PostgreSQL's advisory lock, an arbitrary constant
_WAITING = sa.text("status <> 'open' AND chained IS NULL")  # word for word the condition of the index


class Entry(Struct, frozen=True):
    """The contents of a link: whose row it is, why it is linked, and the row's hash.

    ``kind`` is the row's status; ``REPAIRED`` for one whose times were moved, ``FOLDED`` for rows that are sums now.
    """

    request_id: str
    kind: str
    row_hash: str


def link_hash(link: Any) -> str:
    """Return the hash of a link, with the hash of the one before in it."""
    return digest([link.sequence, link.request_id, link.kind, link.row_hash, link.previous, link.at_ms])


def head_of(sequence: int, chained: str, at_ms: int) -> dict[str, object]:
    """Return what is signed of a link."""
    return {"sequence": sequence, "hash": chained, "at_ms": at_ms}


class _Link(Struct, kw_only=True):
    sequence: int
    request_id: str
    kind: str
    row_hash: str
    previous: str
    at_ms: int
    hash: str = ""
    signature: str | None = None


def lock(store: Store, connection: sa.Connection, *, wait: bool = True) -> bool:
    """Hold the end of the chain until the transaction ends; return whether it is held. SQLite has one writer anyway.

    It comes before any lock on the ledger.
    """
    if store.is_sqlite:
        return True
    if wait:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        return True
    return bool(connection.execute(sa.select(sa.func.pg_try_advisory_xact_lock(_LOCK))).scalar_one())


def append(connection: sa.Connection, entries: Sequence[Entry], keys: ProofKeys, now_ms: int) -> list[int]:
    """Append links, whose last is signed, and return their numbers. The caller holds the ``lock``."""
    newest = sa.select(links.c.sequence, links.c.hash).order_by(links.c.sequence.desc()).limit(1)
    last = connection.execute(newest).one_or_none()
    sequence, previous = (0, GENESIS) if last is None else last
    made = []
    for entry in entries:
        sequence += 1
        link = _Link(
            sequence=sequence,
            request_id=entry.request_id,
            kind=entry.kind,
            row_hash=entry.row_hash,
            previous=previous,
            at_ms=now_ms,
        )
        link.hash = previous = link_hash(link)
        made.append(link)
    made[-1].signature = keys.sign(head_of(sequence, previous, now_ms))
    insert_rows(connection, links, [{name: getattr(link, name) for name in _Link.__struct_fields__} for link in made])
    return [link.sequence for link in made]


def extend(store: Store, now_ms: int, *, rows: int | None = None, wait: bool = False) -> int:
    """Link a batch of settled rows without links, and return how many. Idempotent, for any process.

    Without ``wait``, nothing is done while another process holds the end of the chain.
    """
    rows = BATCH_ROWS if rows is None else rows
    waiting = sa.select(ledger.c.request_id).where(_WAITING).limit(1)
    if store.read(lambda connection: connection.execute(waiting).first(), timeout=TIMEOUT_SECONDS) is None:
        return 0
    return store.write(partial(_extend, store=store, now_ms=now_ms, rows=rows, wait=wait), timeout=TIMEOUT_SECONDS)


def _extend(connection: sa.Connection, *, store: Store, now_ms: int, rows: int, wait: bool) -> int:
    if not lock(store, connection, wait=wait):
        return 0
    found = connection.execute(
        sa.select(ledger)
        .where(_WAITING)
        .order_by(ledger.c.request_id)
        .limit(rows)
        .with_for_update(skip_locked=True)  # a settlement that runs is linked in the next round
    ).mappings()
    waiting = [Entry(row["request_id"], row["status"], row_hash(row)) for row in found]
    if waiting:
        _link(connection, store, waiting, now_ms)
    return len(waiting)


def _link(connection: sa.Connection, store: Store, entries: Sequence[Entry], now_ms: int) -> None:
    numbers = append(connection, entries, make_keys(connection, store), now_ms)
    marks = [{"request_id": entry.request_id, "chained": n} for entry, n in zip(entries, numbers, strict=True)]
    update_rows(connection, ledger, ("request_id",), marks)


def link_repaired(connection: sa.Connection, store: Store, request_ids: Iterable[str], now_ms: int) -> None:
    """Link rows anew whose times were moved. The caller holds the ``lock`` of the chain and that of the ledger."""
    ids = list(request_ids)
    for first in range(0, len(ids), BATCH_ROWS):
        chosen = ledger.c.request_id.in_(ids[first : first + BATCH_ROWS])
        query = sa.select(ledger).where(chosen).order_by(ledger.c.request_id)
        entries = [
            Entry(row["request_id"], "recovered" if row["status"] == "recovered" else REPAIRED, row_hash(row))
            for row in connection.execute(query).mappings()
        ]
        _link(connection, store, entries, now_ms)


def link_folded(connection: sa.Connection, store: Store, request_ids: Any, now_ms: int) -> None:
    """Link the links of rows that are about to be folded. The caller holds both locks, as for ``link_repaired``."""
    of_rows = sa.and_(links.c.request_id.in_(request_ids), links.c.folded_by.is_(None))
    query = sa.select(links.c.sequence, links.c.row_hash).where(of_rows).order_by(links.c.sequence)
    found = [[sequence, hashed] for sequence, hashed in connection.execute(query)]
    (number,) = append(connection, [Entry("", FOLDED, digest(found))], make_keys(connection, store), now_ms)
    connection.execute(sa.update(links).where(of_rows).values(folded_by=number))
