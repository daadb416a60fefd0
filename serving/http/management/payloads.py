"""``/api/2.0/serving-endpoints/{name}/payloads``: the texts of an endpoint's requests, where its payload log is on.

They are for callers who manage: a text is of whatever tenant sent the request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...dialects.base import JSON
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ...metering.ledger.ledger import Ledger
from ...metering.usage.payloads import Payloads, write_parquet
from ...metering.usage.reply_types import DeletedPayloads, PayloadPage
from ..query_parameters import limit_of, parameters, refuse_beside_export
from ..route import Route
from .attachments import PARQUET, attached
from .paths import PAYLOADS

MAX_ROWS = 200
DEFAULT_ROWS = 50
QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "description": f"Requests ({DEFAULT_ROWS})"},
    "cursor": {"type": "string", "description": "next_cursor of the previous page"},
    "request_id": {"type": "string", "minLength": 1, "maxLength": 256, "description": "Only this request"},
    "format": {"enum": ["json", "parquet"]},
}


def get_payloads(server: WorkerState, request: Request) -> Answer:
    """Respond with a page of requests, or with all of them as Parquet. Raises ``NotFound``, ``InvalidField``."""
    ledger = _ledger(server, request)
    asked = parameters(request, QUERY)
    source, now_ms = Payloads(ledger.store), ledger.now_ms()
    if asked.get("format") == "parquet":
        refuse_beside_export(asked, ("limit", "cursor", "request_id"), "parquet", "request")
        return attached(
            "payloads.parquet", PARQUET, lambda file: write_parquet(source.rows(request.name, now_ms), file)
        )
    page, cursor = source.page(
        request.name,
        now_ms,
        limit=limit_of(asked, MAX_ROWS, DEFAULT_ROWS),
        cursor=asked.get("cursor"),
        request_id=asked.get("request_id"),
    )
    return json_answer({"payloads": list(map(msgspec.structs.asdict, page)), "next_cursor": cursor})


def delete_payloads(server: WorkerState, request: Request) -> Answer:
    """Delete all texts of an endpoint. The log stays on, if it is."""
    ledger = _ledger(server, request)
    return json_answer({"deleted": Payloads(ledger.store).delete(request.name, by=request.actor)})


def _ledger(server: WorkerState, request: Request) -> Ledger:
    if server.ledger is None:
        raise NotFound("this server keeps no payload log; start it with --database")
    server.managed_endpoints().get(request.name, request.caller)  # which it may see
    return server.ledger


ROUTES = (
    Route(
        method="GET",
        path=PAYLOADS,
        handler=with_body(get_payloads),
        reply=PayloadPage,
        summary="The texts of an endpoint's requests, where its payload log is on",
        auth=Auth.MANAGE,
        query=QUERY,
        produces=(JSON, PARQUET),
    ),
    Route(
        method="DELETE",
        path=PAYLOADS,
        handler=with_body(delete_payloads),
        reply=DeletedPayloads,
        summary="Delete the logged texts of an endpoint",
        auth=Auth.MANAGE,
    ),
)
