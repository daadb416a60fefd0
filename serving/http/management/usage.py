"""``GET /api/2.0/usage``: the ledger by time, tenant and endpoint; as pages, sums, CSV or Parquet.

A key sees its own usage; with the scope "usage", its tenant's; with "manage", all. Money is a decimal string.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...dialects.base import JSON
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField, NotFound, PermissionDenied
from ...metering.accounts.authorization import Caller
from ...metering.usage.export import csv_lines, write_parquet
from ...metering.usage.filter import MAX_VERSION, filter_of, groups_of
from ...metering.usage.reply_types import Bill, UsagePageInfo
from ...metering.usage.usage import ALLOWED_GROUPS, MAX_PAGE, Usage, UsageFilter, bill
from ..query_parameters import refuse_beside_export
from ..route import Route
from .attachments import PARQUET, attached, attachment
from .paths import USAGE

_NAME = {"type": "string", "minLength": 1, "maxLength": 256}
_TIME = {"type": "string", "description": "A day, an ISO 8601 time or milliseconds since the epoch"}
USAGE_QUERY: dict[str, dict[str, Any]] = {
    "start": _TIME,
    "end": _TIME,
    "tenant": _NAME,
    "endpoint": _NAME,
    "entity": _NAME,
    "key_id": _NAME,
    "status": {"enum": ["open", "ok", "error", "aborted", "recovered"]},
    "adapter": _NAME,
    "model_version": _NAME | {"maxLength": MAX_VERSION, "description": "A model's name and version: assistant/7"},
    "content_hash": _NAME,
    "end_user": _NAME | {"description": "The user that requests named"},
    "client_request_id": _NAME,
    "tag": {"type": "string", "description": "NAME=VALUE: a label of metadata or usage_context"},
    "by": {"type": "string", "description": f"Sums by {ALLOWED_GROUPS}; several with commas"},
    "format": {"enum": ["json", "csv", "parquet"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "description": "Rows per page"},
    "cursor": {"type": "string", "description": "next_cursor of the previous page"},
}
FORMATS = tuple(USAGE_QUERY["format"]["enum"])
CSV_LINES = 200


def get_usage(server: WorkerState, request: Request) -> Answer:
    """Respond with usage. Raises ``NotFound`` without a ledger, and the errors of ``usage``."""
    if server.ledger is None:
        raise NotFound("this server keeps no ledger; start it with --database")
    for name, values in request.parameters().items():
        if name not in USAGE_QUERY:
            raise InvalidField(name[:80], values[0], "no such parameter; expected one of " + ", ".join(USAGE_QUERY))
    return usage(Usage(server.ledger.store), request.caller, request.single_parameters())


def usage(source: Usage, caller: Caller, asked: Mapping[str, str]) -> Answer:
    """Respond with the requested usage that ``caller`` may see.

    Raises ``InvalidField``, ``PermissionDenied`` and ``Unavailable``.
    """
    what = _visible(filter_of(asked), caller)
    form = asked.get("format", "json")
    if form not in FORMATS:
        raise InvalidField("format", form, "one of " + ", ".join(FORMATS))
    if form != "json":
        refuse_beside_export(asked, ("by", "limit", "cursor"), form, "row")
        return _csv(source, what) if form == "csv" else _parquet(source, what)
    if "by" in asked:
        return _sums(source, what, asked)
    page = source.page(what, limit=_limit(asked.get("limit")), cursor=asked.get("cursor"))
    rows = [row.to_wire() for row in page.rows]
    return json_answer({"currency": source.currency(), "usage": rows, "next_cursor": page.next_cursor})


def _visible(what: UsageFilter, caller: Caller) -> UsageFilter:
    """Restrict ``what`` to what ``caller`` may see: everything with the scope "manage", its tenant's usage with
    "usage", otherwise its own. Raises ``PermissionDenied``."""
    if caller.manages:
        return what
    if what.tenant not in (None, caller.tenant):
        raise PermissionDenied(
            f"tenant: the key belongs to tenant {caller.tenant!r}; it sees only that one", param="tenant"
        )
    what = msgspec.structs.replace(what, tenant=caller.tenant)
    if "usage" in caller.scopes:
        return what
    if what.key_id not in (None, caller.key_id):
        raise PermissionDenied("key_id: without the scope 'usage' a key sees only its own usage", param="key_id")
    return msgspec.structs.replace(what, key_id=caller.key_id)


def _limit(value: str | None) -> int:
    if value is None:
        return 100
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MAX_PAGE) or len(value) > 9:
        raise InvalidField("limit", value, f"an integer from 1 to {MAX_PAGE}")
    return int(value)


def _sums(source: Usage, what: UsageFilter, asked: Mapping[str, str]) -> Answer:
    for name in ("limit", "cursor"):
        if name in asked:
            raise InvalidField(name, asked[name], "no value with by: sums are not paginated")
    by = groups_of(asked["by"])
    return json_answer(bill(source, what, by))


def _csv(source: Usage, what: UsageFilter) -> Answer:
    lines = csv_lines(source, what)
    first = next(lines)  # read before the status line is sent; the rows are read while they are sent

    def chunks() -> Iterator[bytes]:
        yield first.encode()
        while batch := "".join(itertools.islice(lines, CSV_LINES)):
            yield batch.encode()

    return Answer(body=chunks(), content_type="text/csv; charset=utf-8", headers=attachment("usage.csv"))


def _parquet(source: Usage, what: UsageFilter) -> Answer:
    return attached("usage.parquet", PARQUET, lambda file: write_parquet(source, what, file))


ROUTES = (
    Route(
        method="GET",
        path=USAGE,
        handler=with_body(get_usage),
        reply=UsagePageInfo | Bill,
        summary="Usage and its cost: rows, sums, CSV or Parquet",
        query=USAGE_QUERY,
        produces=(JSON, "text/csv", PARQUET),
    ),
)
