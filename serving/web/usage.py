"""``GET /api/2.0/usage``: the ledger by time, tenant and endpoint; in pages, in sums, as CSV or Parquet.

A key sees its own tenant, a key with the scope "manage" sees all. Mounted by ``add_routes``.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import msgspec
from flask import Flask, Response, request

from ..dialects import DIALECTS
from ..errors import InternalError, InvalidField, NotFound, PermissionDenied, ServingError, Unauthenticated
from ..metering.export import csv_lines, write_parquet
from ..metering.keys import ANONYMOUS, Caller
from ..metering.usage import MAX_PAGE, Usage, UsageFilter
from ..metering.usage_filter import NAMES, filter_of, groups_of
from . import logs
from .answer import Answer, error_answer, json_answer
from .exchange import Exchange, request_id_from
from .invoke import Server

PATH = "/api/2.0/usage"
FORMATS = ("json", "csv", "parquet")
PARAMETERS = ("start", "end", *NAMES, "by", "format", "limit", "cursor")
CSV_LINES = 200
CHUNK_BYTES = 1 << 16


def add_routes(app: Flask, server: Server) -> None:
    """Mount the usage API on ``app``."""

    def view() -> Response:
        exchange = Exchange(
            request_id=request_id_from(request.headers.get("X-Request-Id")), method=request.method, path=request.path
        )
        answer = _answered(server, exchange)
        exchange.finish(answer.status)
        response = Response(answer.body, status=answer.status, content_type=answer.content_type, headers=answer.headers)
        response.headers["X-Request-Id"] = exchange.request_id
        return response

    app.add_url_rule(PATH, endpoint="usage", view_func=view, methods=["GET"], provide_automatic_options=False)


def _answered(server: Server, exchange: Exchange) -> Answer:
    try:
        caller = caller_of(server, request.headers.get("Authorization", ""))
        exchange.key = caller.key_id
        if server.ledger is None:
            raise NotFound("this server keeps no ledger; start it with --database")
        return usage(Usage(server.ledger.store), caller, _single(request.args.to_dict(flat=False)))
    except ServingError as error:
        return error_answer(DIALECTS["mlflow"], error)
    except Exception:
        logs.event("fault", level=logging.ERROR, exc_info=True, request_id=exchange.request_id)
        told = InternalError(f"internal error; the log has it under {exchange.request_id}")
        return error_answer(DIALECTS["mlflow"], told)


def caller_of(server: Server, authorization: str) -> Caller:
    """Who asks, whatever the key may do. Raises ``Unauthenticated`` where the server asks for keys."""
    if server.keys is None:
        return ANONYMOUS
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("send an API key: Authorization: Bearer sk-…")
    found: Caller = server.keys.verify(secret.strip(), scope=None)
    return found


def _single(asked: Mapping[str, list[str]]) -> dict[str, str]:
    for name, values in asked.items():
        if name not in PARAMETERS:
            raise InvalidField(name[:80], values[0], "no such parameter; known are " + ", ".join(PARAMETERS))
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
