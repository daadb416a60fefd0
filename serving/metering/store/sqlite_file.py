"""Make sure that a running process uses the SQLite file that currently has the database's name.

A file that was deleted, or replaced by a backup, lives on for processes that have it open, and their writes to it are
lost. A connection is therefore used only while the name still refers to its file. Otherwise the database is reopened,
but never created again.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa

_KEY = "file"  # of a connection record's ``info``: device and inode


class SqliteFile:
    """A listener on the pool of ``engine``, whose connections are to the database at ``path``.

    ``store_id`` is the identity that the database must have; None accepts any. A refusal is a
    ``sqlite3.OperationalError``, as if the file could not be opened.
    """

    def __init__(self, engine: sa.Engine, path: str) -> None:
        self.path = Path(path.removeprefix("file:").partition("?")[0]).absolute()
        self.store_id: str | None = None
        sa.event.listen(engine, "do_connect", self._before)
        sa.event.listen(engine, "connect", self._after)
        sa.event.listen(engine, "checkout", self._check)

    def _before(self, _dialect: Any, record: Any, _args: Any, _parameters: Any) -> None:
        there = self._there()
        if there is None:
            raise sqlite3.OperationalError(f"there is no file {self.path} any more")
        if record is not None:
            record.info[_KEY] = there

    def _after(self, connection: Any, _record: Any) -> None:
        if self.store_id is None:
            return
        cursor = connection.cursor()
        try:
            found = cursor.execute("SELECT store_id FROM identity").fetchone()
        finally:
            cursor.close()
        if found is None or found[0] != self.store_id:
            raise sqlite3.OperationalError(f"{self.path} is another store than the one that this process began with")

    def _check(self, _connection: Any, record: Any, _proxy: Any) -> None:
        if record.info.get(_KEY) != self._there():
            raise sa.exc.DisconnectionError(f"{self.path} was replaced")

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
