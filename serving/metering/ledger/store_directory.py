"""The state directory of a store: files that its processes leave to be settled, under the store's identity.

::

    <state>/<store id>/owners/    one directory per process: lock, progress, spool (``lease_owner``)
    <state>/<store id>/engines/   one journal per process and engine (``serving.journal``)

``<state>`` belongs to the user, so all stores of this user's servers share it, such as staging beside production.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import sqlalchemy as sa

from ...system.journal import ENGINES, WrittenJournal, journals
from ...system.progress import read_progress
from ..store.identity import Identity, ensure_identity
from ..store.store import Store
from ..store.tables import journals as positions
from ..store.tables import ledger, owners
from .lease_owner import OWNERS, DeadOwner, take_over
from .spool import spooled_ids

log = logging.getLogger(__name__)


def open_directory(store: Store, root: Path) -> Path:
    """Return the directory of ``store`` under ``root``, creating it if missing.

    It takes over files that an earlier release left in ``root`` itself.
    """
    found = ensure_identity(store)
    store.expect(found.store_id)
    directory = root / found.store_id
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if found.is_new and (left := former_directory(root, found)) is not None:
        log.warning(
            "this database is a copy: from here on it is another store than the one it was copied from. Should it have "
            "been moved, 'mlflow-llm usage settle --moved' takes over what is left in %s",
            left,
        )
    _adopt_legacy_files(store, root, directory)
    return directory


def former_directory(root: Path, found: Identity) -> Path | None:
    """Return this host's directory of the store that this one was copied from; None if nothing is left in it."""
    if found.former_id is None:
        return None
    directory = root / found.former_id
    has_any = any(any(part.iterdir()) for name in (OWNERS, ENGINES) if (part := directory / name).is_dir())
    return directory if has_any else None


def _adopt_legacy_files(store: Store, root: Path, directory: Path) -> None:
    """Move files of ended processes that this store knows: earlier releases kept the files of all stores together."""
    for found in sorted((root / OWNERS).iterdir()) if (root / OWNERS).is_dir() else ():
        owner = None if found.name.startswith(".") else take_over(found)
        if owner is not None:
            if _knows_owner(store, owner):
                _move(found, directory / OWNERS)
            owner.release()
    for journal in journals(root / ENGINES):
        if journal.is_final() and _knows_journal(store, journal):
            _move(journal.directory, directory / ENGINES)


def _move(found: Path, to: Path) -> None:
    to.mkdir(exist_ok=True, mode=0o700)
    with contextlib.suppress(FileNotFoundError):  # another worker has just done it
        found.rename(to / found.name)


def _knows_owner(store: Store, owner: DeadOwner) -> bool:
    ids = {seen.request_id for seen in read_progress(owner.directory / "progress")} | spooled_ids(owner.directory)
    known = sa.select(owners.c.owner).where(owners.c.owner == owner.name)
    return store.read(lambda c: c.execute(known).first()) is not None or _knows_one(store, ids)


def _knows_journal(store: Store, journal: WrittenJournal) -> bool:
    counted, _ = journal.ended(0, 1000)
    known = sa.select(positions.c.journal).where(positions.c.journal == journal.name)
    ids = {one.request_id for one in (*counted, *journal.running())}
    return store.read(lambda c: c.execute(known).first()) is not None or _knows_one(store, ids)


def _knows_one(store: Store, request_ids: set[str]) -> bool:
    known = sa.select(ledger.c.request_id).where(ledger.c.request_id.in_(sorted(request_ids)[:500])).limit(1)
    return store.read(lambda c: c.execute(known).first()) is not None
