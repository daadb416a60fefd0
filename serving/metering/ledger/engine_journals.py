"""Read the engines' own counts from their journals into the ledger, as ``generated_tokens`` beside delivered ones.

A journal's position moves in the same transaction as the rows, so each count is added exactly once, whichever process
of this host comes first and however often one of them is killed.

The journals of an engine on another host are read by that host's command if it has joined the database, else by every
server that uses the engine, over its connection (``collect_remote``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from ...system.file_locks import try_acquire
from ...system.journal import DONE, ENGINES, Generated, WrittenJournal
from ...system.journal import journals as written_journals
from ..store.store import Store
from ..store.tables import journals, ledger

BATCH_ROWS = 200
"""Rows a transaction: a few milliseconds of the store's write lock."""
MAX_BATCHES = 100
"""At most so many a journal and round: an engine that writes faster than the store takes must not hold up the rest."""

# counts take the place of what was assumed without them (``count_audit``)
_counted = ledger.c.generated_tokens - ledger.c.assumed_tokens + sa.bindparam("tokens")
_enough = sa.or_(ledger.c.assumed_tokens == 0, _counted >= ledger.c.completion_tokens)
_add = (
    sa.update(ledger)
    .where(ledger.c.request_id == sa.bindparam("id"))
    .values(
        generated_tokens=sa.case((_enough, _counted), else_=ledger.c.completion_tokens),
        assumed_tokens=sa.case((_enough, 0), else_=ledger.c.completion_tokens - _counted),
    )
)


class ReadableJournal(Protocol):
    """A journal, here or on another host (``WrittenJournal``)."""

    name: str

    def after(self, position: int, limit: int, /) -> tuple[list[Generated], int]: ...
    def forget(self, position: int, /) -> None: ...
    def remove(self) -> bool: ...


def collect(store: Store, state_dir: Path) -> int:
    """Add the new counts in this host's journals to the ledger, and return how many."""
    return sum(_collect(store, journal) for journal in written_journals(state_dir / ENGINES))


def collect_remote(store: Store, journals: Iterable[ReadableJournal]) -> int:
    """Add the new counts in journals of other hosts to the ledger, and return how many.

    Nothing keeps several readers apart but the positions, so those of journals that are done stay in the store.
    """
    return sum(_read(store, journal, forget_position=False) for journal in journals)


def _collect(store: Store, journal: WrittenJournal) -> int:
    try:
        reader = try_acquire(str(journal.directory / "reader"))
    except OSError:  # another process has just removed it, or a full disk has no room for the lock
        return 0
    if reader is None:  # another process is reading it
        return 0
    try:
        return _read(store, journal)
    except FileNotFoundError:  # another process has just removed it
        return 0
    finally:
        reader.release()


def _read(store: Store, journal: ReadableJournal, *, forget_position: bool = True) -> int:
    position, added = _position(store, journal.name), 0
    for _ in range(MAX_BATCHES):
        if position == DONE:
            break
        found, reached = journal.after(position, BATCH_ROWS)
        if reached == position:
            break
        if not _apply(store, journal.name, found, position, reached):
            return added  # another process was first
        position, added = reached, added + len(found)
        journal.forget(position)
    if position == DONE and journal.remove() and forget_position:
        store.write(lambda c: c.execute(sa.delete(journals).where(journals.c.journal == journal.name)))
    return added


def _position(store: Store, name: str) -> int:
    query = sa.select(journals.c.position).where(journals.c.journal == name)
    return store.read(lambda connection: connection.execute(query).scalar_one_or_none()) or 0


def _apply(store: Store, name: str, found: list[Generated], before: int, after: int) -> bool:
    """Add the counts, unless the journal's position is no longer ``before``; return whether they were added."""
    tokens: Counter[str] = Counter()
    for one in found:
        tokens[one.request_id] += one.tokens
    rows = [{"id": request_id, "tokens": tokens[request_id]} for request_id in sorted(tokens)]  # the order of locking

    def work(connection: sa.Connection) -> bool:
        blank = store.insert(journals).values(journal=name, position=0)
        connection.execute(blank.on_conflict_do_nothing())
        this = sa.and_(journals.c.journal == name, journals.c.position == before)
        if not connection.execute(sa.update(journals).where(this).values(position=after)).rowcount:
            return False
        if rows:
            connection.execute(_add, rows)
        return True

    return store.write(work)
