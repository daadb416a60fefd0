"""Canonical JSON of what is hashed and signed: UTF-8, keys in order, no spaces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from ..store.tables import ledger

UNCHAINED = frozenset({"chained", "generated_tokens", "assumed_tokens"})
"""Columns of the ledger that change after a row was settled: the engines' own count may arrive later."""
ROW_COLUMNS = tuple(column.name for column in ledger.c if column.name not in UNCHAINED)


def canonical(value: object) -> bytes:
    """Return the canonical JSON of ``value``."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: object) -> str:
    """Return the SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()


def row_hash(row: Mapping[str, Any] | sa.RowMapping) -> str:
    """Return the hash of a row of the ledger.

    Columns that are null are left out, so that a column which a later release adds changes no hash.
    """
    return digest({name: row[name] for name in ROW_COLUMNS if row[name] is not None})
