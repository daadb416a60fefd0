"""PostgreSQL's statements in SQLite's words, for what the product sends to PostgreSQL alone: slices of limits.

Each rule is about one construct. A statement that has a construct without a rule fails in SQLite, so that a schedule
that sends it fails.
"""

from __future__ import annotations

import base64
import functools
import re
import sqlite3

from ...metering.store.statements import PAIRS, TEXTS

_RECORDS = re.compile(r"json_to_recordset\(CAST\(%s AS json\)\) AS given\((?P<columns>(?:[^()]|\([^()]*\))*)\)")
_ORDERED = re.compile(r"(string_agg\(concat_ws\(.*?\), chr\(30\)) ORDER BY [^)]*\)")
_NOTHING = ("LOCK TABLE ", "SET LOCAL ")


@functools.cache
def translated(sql: str) -> str:
    """Return what SQLite has to be told for ``sql``, which may be of SQLite already."""
    if sql.startswith(_NOTHING):  # one transaction writes at a time, and there is nothing to plan
        return "SELECT 1 WHERE 0"
    for table in (PAIRS, TEXTS):
        sql = sql.replace(table["postgresql"], table["sqlite"])
    sql = _RECORDS.sub(_records, sql)
    return _ORDERED.sub(r"\1)", sql).replace(" FOR UPDATE", "").replace("%s", "?")


def _records(found: re.Match[str]) -> str:
    names = [column.split()[0] for column in re.split(r",\s*(?![^()]*\))", found["columns"])]
    columns = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in names)
    return f"(SELECT {columns} FROM json_each(?)) AS given"


def add_functions(connection: sqlite3.Connection) -> None:
    """Give a connection of SQLite the functions of PostgreSQL that the statements call."""
    connection.create_function("chr", 1, chr, deterministic=True)
    connection.create_function("concat_ws", -1, _concat, deterministic=True)
    connection.create_function("decode", 2, _decode, deterministic=True)
    connection.create_aggregate("string_agg", 2, _SortedTexts)  # type: ignore[arg-type]


def _concat(separator: str, *values: object) -> str:
    return separator.join(str(value) for value in values if value is not None)


def _decode(text: str | None, _form: str) -> bytes | None:
    return None if text is None else base64.b64decode(text)


class _SortedTexts:
    """The aggregate ``string_agg(text, separator ORDER BY …)`` over texts whose fields are separated by ``chr(31)``."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._separator = ""

    def step(self, text: str, separator: str) -> None:
        self._texts.append(text)
        self._separator = separator

    def finalize(self) -> str | None:
        return self._separator.join(sorted(self._texts, key=lambda text: text.split("\x1f"))) if self._texts else None
