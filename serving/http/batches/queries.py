"""Shared parts of the routes of files and batches: their form, their store, and the pages of their lists."""

from __future__ import annotations

from typing import Any

from ...dialects import DIALECTS
from ...frontend.operation import Auth, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ...metering.ledger.ledger import Ledger
from ..route import Route

DIALECT = DIALECTS["openai"]
MAX_LIMIT = 100
DEFAULT_LIMIT = 20
AFTER = {"type": "string", "minLength": 1, "maxLength": 64, "description": "The last id of the previous page"}
PAGE: dict[str, dict[str, Any]] = {
    "after": AFTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "description": f"Entries ({DEFAULT_LIMIT})"},
}


def ledger_of(server: WorkerState) -> Ledger:
    """Return the ledger, whose store has files and batches. Raises ``NotFound`` if the server has none."""
    if server.ledger is None:
        raise NotFound("this server keeps no files and batches; start it with --database")
    return server.ledger


def route(method: str, path: str, handler: Any, summary: str, reply: Any, **more: Any) -> Route:
    """Return a route in OpenAI's form for callers who invoke."""
    return Route(
        method=method,
        path=path,
        handler=with_body(handler),
        summary=summary,
        reply=reply,
        dialect=DIALECT,
        auth=Auth.INVOKE,
        **more,
    )
