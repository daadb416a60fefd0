"""The identity of a store: a UUID in the database, together with the database's place.

A copy of a database (``cp`` of SQLite's file, ``pg_dump`` and restore) has the UUID of the original, whose processes
may be alive or have left spools that belong only to the original. A copy is recognised by its place and gets a UUID of
its own:

* SQLite: the file's path, and its device and inode. One of the two stays the same if a file is renamed or restored in
  place, or if a file system gives new numbers at every mount; a copy has neither.
* PostgreSQL: the cluster's system identifier with the OIDs of database and table. A database restored from a dump has
  new ones. They are the same whatever URL is used to reach the database, and on a promoted standby.
"""

from __future__ import annotations

import os
import uuid

import sqlalchemy as sa
from msgspec import Struct

from .store import Store
from .tables import identity

WAIT_SECONDS = 30.0  # long, since a worker starts beside others that may hold the store


class Identity(Struct, frozen=True, kw_only=True):
    """A store's identity. ``former_id`` is the UUID of the store that this one was copied from; ``is_new`` means that
    the copy was noticed just now."""

    store_id: str
    former_id: str | None
    is_new: bool = False


def ensure_identity(store: Store) -> Identity:
    """Return the identity of ``store``, giving it its first one, or a new one if it turns out to be a copy."""

    def look(connection: sa.Connection) -> Identity | None:
        store_id, known, former_id = connection.execute(_find).one()
        is_known = _place(connection, store) == known
        return Identity(store_id=store_id, former_id=former_id) if is_known else None

    def settle(connection: sa.Connection) -> Identity:
        store_id, known, former_id = connection.execute(_find.with_for_update()).one()
        place = _place(connection, store)
        if known and not _is_same(place, known):
            new_id = str(uuid.uuid4())
            connection.execute(sa.update(identity).values(store_id=new_id, place=place, former_id=store_id))
            return Identity(store_id=new_id, former_id=store_id, is_new=True)
        connection.execute(sa.update(identity).values(place=place))
        return Identity(store_id=store_id, former_id=former_id)

    return store.read(look, timeout=WAIT_SECONDS) or store.write(settle, timeout=WAIT_SECONDS)


_find = sa.select(identity.c.store_id, identity.c.place, identity.c.former_id)


def _place(connection: sa.Connection, store: Store) -> str:
    """Return the place of the database: a line for each property by which it is recognised."""
    if store.is_sqlite:
        (path,) = (row.file for row in connection.execute(sa.text("PRAGMA database_list")) if row.name == "main")
        found = os.stat(path)
        return f"{os.path.realpath(path)}\n{found.st_dev}:{found.st_ino}"
    table = connection.execute(sa.text("SELECT CAST(CAST('identity' AS regclass) AS oid)")).scalar_one()
    database = connection.execute(
        sa.text("SELECT oid FROM pg_database WHERE datname = current_database()")
    ).scalar_one()
    allowed = "SELECT has_function_privilege('pg_control_system()', 'execute')"
    cluster = ""
    if connection.execute(sa.text(allowed)).scalar_one():
        cluster = connection.execute(sa.text("SELECT system_identifier FROM pg_control_system()")).scalar_one()
    return f"{cluster}/{database}/{table}"


def _is_same(place: str, known: str) -> bool:
    """Return whether the two places have a line in common."""
    return any(one == other for one, other in zip(place.split("\n"), known.split("\n"), strict=False))
