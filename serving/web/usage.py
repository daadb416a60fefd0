"""``GET /api/2.0/usage``: the ledger by time, tenant and endpoint; in pages, in sums, as CSV or Parquet.

A key sees its own tenant, a key with the scope "manage" sees all.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import msgspec

from ..errors import InvalidField, NotFound, PermissionDenied
from ..metering.export import csv_lines, write_parquet
from ..metering.keys import Caller
from ..metering.usage import MAX_PAGE, Usage, UsageFilter
from ..metering.usage_filter import filter_of, groups_of
from .answer import Answer, json_answer
from .invoke import Server
from .management import Asked
from .management_routes import USAGE_QUERY

FORMATS = tuple(USAGE_QUERY["format"]["enum"])
CSV_LINES = 200
CHUNK_BYTES = 1 << 16


def answer(server: Server, asked: Asked) -> Answer:
    """Raises ``NotFound`` without a ledger, and what ``usage`` raises."""
    if server.ledger is None:
        raise NotFound("this server keeps no ledger; start it with --database")
    return usage(Usage(server.ledger.store), asked.caller, _single(asked.query))


def _single(asked: Mapping[str, list[str]]) -> dict[str, str]:
    for name, values in asked.items():
        if name not in USAGE_QUERY:
            raise InvalidField(name[:80], values[0], "no such parameter; known are " + ", ".join(USAGE_QUERY))
        if len(values) > 1:
            raise InvalidField(name, values, "one value")
    return {name: values[0] for name, values in asked.items()}


def usage(source: Usage, caller: Caller, asked: Mapping[str, str]) -> Answer:
    """What ``caller`` may see of what is asked. Raises ``InvalidField``, ``PermissionDenied``, ``Unavailable``."""
    what = _visible(filter_of(asked), caller)
    form = asked.get("format", "json")
    if form not in FORMATS:
        raise InvalidField("format", form, "one of " + ", ".join(FORMATS))
    if form != "json":
        for name in ("by", "limit", "cursor"):
            if name in asked:
                raise InvalidField(name, asked[name], f"no value with format={form}: an export has every row")
        return _csv(source, what) if form == "csv" else _parquet(source, what)
    if "by" in asked:
        return _sums(source, what, asked)
    page = source.page(what, limit=_limit(asked.get("limit")), cursor=asked.get("cursor"))
    return json_answer({"usage": page.rows, "next_cursor": page.next_cursor})


def _visible(what: UsageFilter, caller: Caller) -> UsageFilter:
    if "manage" in caller.scopes:
        return what
    if what.tenant not in (None, caller.tenant):
        raise PermissionDenied(f"tenant: the key is of tenant {caller.tenant!r}; it sees no other", param="tenant")
    return msgspec.structs.replace(what, tenant=caller.tenant)


def _limit(value: str | None) -> int:
    if value is None:
        return 100
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MAX_PAGE) or len(value) > 9:
        raise InvalidField("limit", value, f"an integer from 1 to {MAX_PAGE}")
    return int(value)


def _sums(source: Usage, what: UsageFilter, asked: Mapping[str, str]) -> Answer:
    for name in ("limit", "cursor"):
        if name in asked:
            raise InvalidField(name, asked[name], "no value with by: sums come in one piece")
    by = groups_of(asked["by"])
    found: list[dict[str, Any]] = []
    for total in source.sums(what, by):
        counts = msgspec.to_builtins(total)
        del counts["group"]
        found.append(dict(zip(by, total.group, strict=True)) | counts)
    names = ("tenant", "endpoint", "entity", "unit_minutes", "cost")
    reserved = [dict(zip(names, row, strict=True)) for row in source.provisioned_cost(what)]
    return json_answer({"usage": found, "provisioned": reserved})


def _csv(source: Usage, what: UsageFilter) -> Answer:
    lines = csv_lines(source, what)
    first = next(lines)  # before the status line goes out; the rows are read while they are sent

    def chunks() -> Iterator[bytes]:
        yield first.encode()
        while batch := "".join(itertools.islice(lines, CSV_LINES)):
            yield batch.encode()

    return Answer(body=chunks(), content_type="text/csv; charset=utf-8", headers=_attachment("usage.csv"))


def _parquet(source: Usage, what: UsageFilter) -> Answer:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is sent
    try:
        write_parquet(source, what, file)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    headers = _attachment("usage.parquet")
    return Answer(body=_read(file), content_type="application/vnd.apache.parquet", headers=headers)


def _read(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
