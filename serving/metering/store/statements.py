"""Statements of one transaction that go to the database together, so that a database far away costs few round trips.

SQLite executes them one by one; PostgreSQL gets them in a pipeline, and answers all of them at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

PAIRS = {
    "sqlite": "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))",
    "postgresql": "(SELECT value ->> 0, value ->> 1 FROM json_array_elements(CAST(%s AS json)))",
}
"""Pairs of texts as rows, given as one parameter by ``parameter``; the key is the name of SQLAlchemy's dialect."""
TEXTS = {
    "sqlite": "(SELECT value FROM json_each(?))",
    "postgresql": "(SELECT json_array_elements_text(CAST(%s AS json)))",
}
FOR_UPDATE = {"sqlite": "", "postgresql": "FOR UPDATE"}
IDLE_STATUS = 0
"""PostgreSQL's status of a connection that is in no transaction (``PQTRANS_IDLE``)."""
Query = tuple[str, tuple[Any, ...]]


def parameter(values: Iterable[object]) -> str:
    """Return the parameter that ``PAIRS`` and ``TEXTS`` take."""
    return json.dumps(list(values))


def fetch(connection: sa.Connection, *queries: Query, commit: bool = False) -> list[list[tuple[Any, ...]]]:
    """Execute all ``queries``, in order, and return the rows of each; those of a statement without rows are empty.

    On PostgreSQL they take one round trip, which ends the transaction with ``commit``.
    """
    if connection.dialect.name == "sqlite":
        return [[tuple(row) for row in connection.exec_driver_sql(text, given)] for text, given in queries]
    driver: Any = connection.connection.driver_connection
    cursors = [driver.cursor() for _ in queries]
    with pipelined(connection, commit=commit):
        if driver.info.transaction_status == IDLE_STATUS:
            driver.cursor().execute("BEGIN", prepare=False)
        for cursor, (text, given) in zip(cursors, queries, strict=True):
            cursor.execute(text, given or None)
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


def begin(connection: sa.Connection, cursor: Any, *_: object) -> None:
    """Begin a transaction of PostgreSQL before its first statement, which SQLAlchemy calls for each.

    psycopg would do so itself, and wait for the answer even in a pipeline.
    """
    if connection.in_transaction() and cursor.connection.info.transaction_status == IDLE_STATUS:
        cursor.connection.execute("BEGIN", prepare=False)


def insert_rows(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows, all with the same columns, by one statement."""
    if connection.dialect.name == "sqlite":
        connection.execute(sa.insert(table), list(rows))
    else:
        _send(connection, insertion(table, tuple(rows[0])), rows)


def update_rows(
    connection: sa.Connection, table: sa.Table, keys: tuple[str, ...], rows: Sequence[Mapping[str, object]]
) -> None:
    """Update the rows with these ``keys`` by one statement; all have the same columns."""
    if connection.dialect.name == "sqlite":
        given = [{f"{'of' if name in keys else 'to'}_{name}": row[name] for name in row} for row in rows]
        connection.execute(_update_each(table, keys, tuple(rows[0])), given)
    else:
        _send(connection, _update(table, keys, tuple(rows[0])), rows)


def _send(connection: sa.Connection, text: str, rows: Sequence[Mapping[str, object]]) -> None:
    # not ``executemany``, which waits for its answers even in a pipeline
    driver: Any = connection.connection.driver_connection
    driver.cursor().execute(text, (parameter_of_rows(rows),))


def parameter_of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the parameter of PostgreSQL's statements that take rows; bytes are in base64."""
    return msgspec.json.encode(rows).decode()


@functools.cache
def _update_each(table: sa.Table, keys: tuple[str, ...], names: tuple[str, ...]) -> sa.Update:
    this = sa.and_(*(table.c[key] == sa.bindparam(f"of_{key}") for key in keys))
    values: dict[str, Any] = {name: sa.bindparam(f"to_{name}") for name in names if name not in keys}
    return sa.update(table).where(this).values(values)


@functools.cache
def insertion(table: sa.Table, names: tuple[str, ...]) -> str:
    """Return PostgreSQL's statement that inserts the rows of its parameter."""
    columns = ", ".join(names)
    return f"INSERT INTO {table.name} ({columns}) SELECT {_values(table, names)} FROM {_given(table, names)}"


@functools.cache
def _update(table: sa.Table, keys: tuple[str, ...], names: tuple[str, ...]) -> str:
    this = " AND ".join(f"{table.name}.{key} = given.{key}" for key in keys)
    return f"{changing(table, keys, names)} WHERE {this}"


def changing(table: sa.Table, keys: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return PostgreSQL's statement that updates by the rows of its parameter (``given``), without its condition."""
    changes = ", ".join(f"{name} = {_values(table, (name,))}" for name in names if name not in keys)
    return f"UPDATE {table.name} SET {changes} FROM {_given(table, names)}"


def _values(table: sa.Table, names: tuple[str, ...]) -> str:
    """Return the columns of the rows that are given; JSON has no bytes, for which base64 stands."""
    return ", ".join(f"decode(given.{name}, 'base64')" if _is_bytes(table, name) else f"given.{name}" for name in names)


def _given(table: sa.Table, names: tuple[str, ...]) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    types = {name: "text" if _is_bytes(table, name) else table.c[name].type.compile(dialect) for name in names}
    columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
    return f"json_to_recordset(CAST(%s AS json)) AS given({columns})"


def _is_bytes(table: sa.Table, name: str) -> bool:
    return isinstance(table.c[name].type, sa.LargeBinary)


@contextlib.contextmanager
def pipelined(connection: sa.Connection, *, commit: bool = False) -> Iterator[None]:
    """Send the block's statements without waiting for their answers; an error is raised at the end of the block.

    With ``commit`` the transaction is committed with them. Raises what ``connection.execute`` does.
    """
    if connection.dialect.name == "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    errors: type[Exception] = connection.dialect.loaded_dbapi.Error
    try:
        with driver.pipeline():
            yield
            if commit:  # in the same round trip; ``driver.commit`` would make one of its own
                driver.cursor().execute("COMMIT", prepare=False)
    except errors as error:
        lost = connection.dialect.is_disconnect(error, driver, None)  # type: ignore[arg-type]
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            "pipeline", None, error, errors, connection_invalidated=lost, dialect=connection.dialect
        ) from error
