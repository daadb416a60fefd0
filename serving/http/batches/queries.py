"""Shared parts of the routes of files and batches: their store, and the parameters of their lists."""

from __future__ import annotations

from typing import Any

from ...dialects import DIALECTS
from ...frontend.operation import Request
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField, NotFound
from ...metering.ledger.ledger import Ledger

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


def parameters(request: Request, known: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the query parameters. Raises ``InvalidField`` for one that is not ``known``, or not of its enumeration."""
    given = request.single_parameters()
    for name, value in given.items():
        if name not in known:
            raise InvalidField(name[:80], value, "no such parameter; expected one of " + ", ".join(known))
        options = known[name].get("enum")
        if options is not None and value not in options:
            raise InvalidField(name, value, "one of " + ", ".join(options))
    return given


def limit_of(given: dict[str, str], most: int = MAX_LIMIT, default: int = DEFAULT_LIMIT) -> int:
    """Return the number of entries of a page. Raises ``InvalidField``."""
    value = given.get("limit")
    if value is None:
        return default
    if not (value.isascii() and value.isdigit()) or len(value) > 9 or not 1 <= int(value) <= most:
        raise InvalidField("limit", value, f"an integer from 1 to {most}")
    return int(value)
