"""Usage as files: CSV for people, Parquet for tables. Both are written page by page, so size does not matter."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from typing import IO

from .usage import Usage, UsageFilter, UsageRow

FIELDS = UsageRow.__struct_fields__
_BATCH = 2000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_lines(usage: Usage, what: UsageFilter) -> Iterator[str]:
    """A header and a line a request. A text that a spreadsheet would run as a formula gets a leading apostrophe."""
    line = _Line()
    writer = csv.writer(line)
    writer.writerow(FIELDS)
    yield line.text
    for row in usage.rows(what):
        writer.writerow([_cell(getattr(row, name)) for name in FIELDS])
        yield line.text


class _Line:
    """What ``csv.writer`` writes to: keeps the last line."""

    text = ""

    def write(self, text: str) -> int:
        self.text = text
        return len(text)


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write_parquet(usage: Usage, what: UsageFilter, target: str | IO[bytes]) -> int:
    """Rows written. Token counts, money and times are int64; ``started_ms`` and ``ended_ms`` UTC timestamps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, _arrow_type(pa, name)) for name in FIELDS])
    total = 0
    with pq.ParquetWriter(target, schema) as writer:
        for batch in _batched(usage.rows(what)):
            columns = {name: [getattr(row, name) for row in batch] for name in FIELDS}
            writer.write_table(pa.table(columns, schema=schema))
            total += len(batch)
    return total


def _arrow_type(pa: object, name: str) -> object:
    if name.endswith("_ms"):
        return pa.timestamp("ms", tz="UTC")  # type: ignore[attr-defined]
    integer = name.endswith("_tokens") or name.startswith("price_") or name == "cost"
    return pa.int64() if integer else pa.string()  # type: ignore[attr-defined]


def _batched(rows: Iterable[UsageRow]) -> Iterator[list[UsageRow]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
