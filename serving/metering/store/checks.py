"""Checks of a store before it is used: its URL, its file and its schema's revision; and which errors are transient."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from ...interface.errors import Unavailable, without_password

BACKENDS = ("sqlite", "postgresql")
MIGRATIONS = Path(__file__).parents[1] / "migrations"
_VERSIONS_TABLE = "alembic_version"
_VERSIONS: sa.Select[Any] = sa.select(sa.column("version_num")).select_from(sa.table(_VERSIONS_TABLE))
_TRANSIENT_SQLITE = {5, 6, 15, 17}  # SQLITE_BUSY, _LOCKED, _PROTOCOL, _SCHEMA: other connections are active
_TRANSIENT_POSTGRES = ("40", "53300", "55P03")  # deadlocks, too many clients, lock timeouts


class NoStore(ValueError):
    """The error that there is no store at a URL, and retrying will not help. The message has the URL without its
    password."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"database {without_password(url)}: {reason}")


def parsed(given: str) -> sa.URL:
    """Parse a URL and set this package's driver. Raises ``NoStore``."""
    if "://" not in given:
        raise NoStore(given, "is not a URL such as sqlite:///serving.db")
    try:
        url = sa.make_url(given)
    except (ArgumentError, ValueError):
        raise NoStore(given, "is not a URL such as sqlite:///serving.db") from None
    if url.get_backend_name() not in BACKENDS:
        raise NoStore(given, "is neither sqlite:// nor postgresql://")
    if url.get_backend_name() == "postgresql" and find_spec("psycopg") is None:
        raise NoStore(given, "PostgreSQL needs psycopg: pip install 'mlflow-llm[postgres]'")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def check_file(url: sa.URL, *, make: bool) -> None:
    """Raise ``NoStore`` if SQLite's file is missing and must not be created, or has no directory to be created in."""
    text = url.render_as_string(hide_password=False)
    if not url.database or url.database == ":memory:":
        raise NoStore(text, "the metering store needs a file: a database in memory is not shared by workers")
    file = Path(url.database.removeprefix("file:"))
    if not file.parent.is_dir():
        raise NoStore(text, f"there is no directory {file.parent}")
    if not file.exists():
        if not make:
            raise NoStore(text, "there is no such file; serve, keys create, limits set and prices set make one")
        _make_private(file)


def _make_private(file: Path) -> None:
    """Create the file so that only its owner can read it: it will hold key hashes and the ledger.

    SQLite gives its other files the same mode.
    """
    with contextlib.suppress(OSError):  # another process has just created it, or opening it will report the problem
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def revisions() -> list[str]:
    """Return the revisions of the migrations in order, which is the order of their files.

    This does not use alembic, so a process that opens an up-to-date store need not import it.
    """
    return sorted(file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def revision(connection: sa.Connection, known: list[str]) -> str | None:
    """Return the schema's revision, None before the first migration. Raises ``ValueError`` if it is not ours."""
    tables = sa.inspect(connection)
    found = connection.scalars(_VERSIONS).all() if tables.has_table(_VERSIONS_TABLE) else ()
    if not found:
        if connection.dialect.name == "sqlite" and tables.get_table_names():
            raise ValueError("is another program's database")
        return None
    if set(found) <= set(known):
        return str(found[0])
    if tables.has_table("ledger"):
        raise ValueError("was made by a later version of mlflow-llm")
    raise ValueError("is another program's database")


def is_transient(error: Exception) -> bool:
    """Return whether ``error`` was caused by other connections, so that a later attempt may succeed."""
    if not isinstance(error, DBAPIError):
        return True
    code = getattr(error.orig, "sqlite_errorcode", None)
    state = getattr(error.orig, "sqlstate", None) or ""
    return state.startswith(_TRANSIENT_POSTGRES) if code is None else code & 0xFF in _TRANSIENT_SQLITE


def reason(error: BaseException) -> str:
    """Return the first line of the database's own message."""
    original = getattr(error, "orig", None) or error
    return next(iter(str(original).splitlines()), "")[:200] or type(original).__name__


@contextlib.contextmanager
def named(url: str) -> Iterator[None]:
    """Convert errors in opening ``url`` to ``NoStore`` or ``Unavailable``, with the URL and the reason."""
    try:
        yield
    except NoStore:
        raise
    except Unavailable as error:
        message = f"database {without_password(url)}: does not answer: {reason(error.__cause__ or error)}"
        raise Unavailable(message, retry_after=error.retry_after) from error
    except (ValueError, OSError, ModuleNotFoundError, SQLAlchemyError) as error:
        raise NoStore(url, reason(error)) from error
