"""Export usage as CSV or Parquet, page by page, so that its size does not matter."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import IO

from ..accounts.money import units
from .usage import MONEY, UsageFilter, UsageRow, UsageSource

FIELDS = (*UsageRow.__struct_fields__, "currency")
_BATCH_ROWS = 2000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_lines(usage: UsageSource, what: UsageFilter) -> Iterator[str]:
    """Yield a header and one line per request. A text that a spreadsheet would run as a formula gets an apostrophe."""
    line = _Line()
    writer = csv.writer(line)
    writer.writerow(FIELDS)
    yield line.text
    currency = usage.currency()
    for row in usage.rows(what):
        values = (row.to_wire() | {"tags": _tags(row)}).values()
        writer.writerow([_cell(value) for value in (*values, currency)])
        yield line.text


class _Line:
    """A file for ``csv.writer`` that keeps the last line."""

    text = ""

    def write(self, text: str) -> int:
        self.text = text
        return len(text)


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write_parquet(usage: UsageSource, what: UsageFilter, target: str | IO[bytes]) -> int:
    """Write usage as Parquet and return the number of rows.

    Token counts are int64, money values are exact decimals, and ``started_ms`` and ``ended_ms`` are UTC timestamps.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, _arrow_type(pa, name)) for name in FIELDS])
    total, currency = 0, usage.currency()
    with pq.ParquetWriter(target, schema) as writer:
        for batch in _batched(usage.rows(what)):
            columns = {name: [_value(row, name) for row in batch] for name in FIELDS[:-1]}
            columns["currency"] = [currency] * len(batch)
            writer.write_table(pa.table(columns, schema=schema))
            total += len(batch)
    return total


def _arrow_type(pa: object, name: str) -> object:
    if name.endswith("_ms"):
        return pa.timestamp("ms", tz="UTC")  # type: ignore[attr-defined]
    if name in MONEY:
        return pa.decimal128(24, 6)  # type: ignore[attr-defined]
    return pa.int64() if name.endswith("_tokens") else pa.string()  # type: ignore[attr-defined]


def _value(row: UsageRow, name: str) -> object:
    if name == "tags":
        return _tags(row)
    value = getattr(row, name)
    return Decimal(units(value)) if name in MONEY else value


def _tags(row: UsageRow) -> str | None:
    """Return the tags of a row as one JSON object."""
    return None if row.tags is None else json.dumps(row.tags, ensure_ascii=False)


def _batched(rows: Iterable[UsageRow]) -> Iterator[list[UsageRow]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH_ROWS)):
        yield batch
