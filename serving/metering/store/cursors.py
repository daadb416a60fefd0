"""Cursors of pages that are ordered by a number of the table's own."""

from __future__ import annotations

from ...interface.errors import InvalidField

MAX_NUMBER = 2**63 - 1


def number_of(cursor: str) -> int:
    """Return the number of the last row of the page before. Raises ``InvalidField``."""
    if not (cursor.isascii() and cursor.isdigit()) or len(cursor) > 19 or int(cursor) > MAX_NUMBER:
        raise InvalidField("cursor", cursor, "a next_cursor of an earlier page")
    return int(cursor)
