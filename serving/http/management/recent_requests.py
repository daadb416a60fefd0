"""``GET /api/2.0/requests``: the newest requests of the ledger, running ones included, for callers who manage.

It has status, times and tokens, never a text: the ledger keeps none. ``has_payload`` says whether the payload log of
the endpoint does (``payloads``).
"""

from __future__ import annotations

from typing import Any

from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField, NotFound
from ...metering.usage.filter import STATUSES, filter_of
from ...metering.usage.payloads import Payloads
from ...metering.usage.reply_types import RECENT_FIELDS, RecentRequests
from ...metering.usage.usage import Usage, UsageRow
from ..query_parameters import limit_of
from ..route import Route
from .paths import REQUESTS

MAX_ROWS = 200
DEFAULT_ROWS = 50
_NAME = {"type": "string", "minLength": 1, "maxLength": 256}
QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "description": f"Requests ({DEFAULT_ROWS})"},
    "tenant": _NAME,
    "endpoint": _NAME,
    "entity": _NAME,
    "adapter": _NAME,
    "key_id": _NAME,
    "status": {"enum": list(STATUSES)},
}


def recent_requests(server: WorkerState, request: Request) -> Answer:
    """Respond with the newest requests. Raises ``NotFound`` without a ledger, and ``InvalidField``."""
    if server.ledger is None:
        raise NotFound("this server keeps no ledger; start it with --database")
    asked = request.single_parameters()
    for name, value in asked.items():
        if name not in QUERY:
            raise InvalidField(name[:80], value, "no such parameter; expected one of " + ", ".join(QUERY))
    limit = limit_of(asked, MAX_ROWS, DEFAULT_ROWS)
    asked.pop("limit", None)
    rows, now_ms = Usage(server.ledger.store).newest(filter_of(asked), limit), server.ledger.now_ms()
    logged = Payloads(server.ledger.store).logged([row.request_id for row in rows], now_ms)
    return json_answer({"now_ms": now_ms, "requests": [_shown(row, row.request_id in logged) for row in rows]})


def _shown(row: UsageRow, has_payload: bool) -> dict[str, Any]:
    return {name: getattr(row, name) for name in RECENT_FIELDS} | {"has_payload": has_payload}


ROUTES = (
    Route(
        method="GET",
        path=REQUESTS,
        handler=with_body(recent_requests),
        reply=RecentRequests,
        summary="The newest requests: status, times and tokens, no texts",
        auth=Auth.MANAGE,
        query=QUERY,
    ),
)
