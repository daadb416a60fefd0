"""``GET /api/2.0/account``: what a key may know about itself: its scopes, what is left of its limits, its prices."""

from __future__ import annotations

import time
from typing import Any

from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ...metering.accounts.accounts import Accounts
from ...metering.accounts.limits import plain
from ...metering.accounts.money import currency
from ...metering.accounts.prices import plain as plain_price
from ...metering.accounts.reply_types import AccountInfo
from ...metering.accounts.windows import UNITS
from ...metering.ledger.ledger import Ledger
from ...metering.ledger.limits_left import LimitLeft
from ..route import Route
from .paths import ACCOUNT


def account(server: WorkerState, request: Request) -> Answer:
    """Respond with the caller's account. Raises ``NotFound`` without a ledger, and ``Unavailable``."""
    if server.ledger is None:
        raise NotFound("this server keeps no accounts; start it with --database")
    caller, ledger = request.caller, server.ledger
    names = [one.endpoint for one in server.endpoints.seen_by(caller)]
    return json_answer(
        {
            "key_id": caller.key_id,
            "tenant": caller.tenant,
            "scopes": list(caller.scopes),
            "endpoints": None if caller.endpoints is None else list(caller.endpoints),
            "keys": _keys(server, request),
            "currency": currency(ledger.store),
            "limits": [_limit(left) for left in ledger.limits_left(caller, names)],
            "prices": _prices(server, ledger, request),
        }
    )


def _keys(server: WorkerState, request: Request) -> list[dict[str, Any]]:
    """Return the caller's key; with the scope "usage", all keys of its tenant."""
    caller = request.caller
    assert server.ledger is not None
    found = Accounts(server.ledger.store, keys=server.keys).list_keys({"tenant": caller.tenant})["keys"]
    return [key for key in found if "usage" in caller.scopes or key["key_id"] == caller.key_id]


def _limit(left: LimitLeft) -> dict[str, Any]:
    return {
        "scope": left.scope,
        "endpoint": left.endpoint or None,
        "kind": left.kind,
        "unit": UNITS[left.kind],
        "soft": left.soft,
        "allowed": plain(left.kind, left.allowed),
        "used": plain(left.kind, left.used),
        "remaining": plain(left.kind, left.remaining),
        "reset_seconds": left.reset_after,
    }


def _prices(server: WorkerState, ledger: Ledger, request: Request) -> list[dict[str, Any]]:
    """Return the price now of each served model that the caller sees: a row of its usage would say it too."""
    now = time.time()
    return [
        {
            "endpoint": entity.endpoint,
            "served_model": entity.entity_shown_to(request.caller),
            **plain_price(ledger.prices.at(entity.entity, now)),
        }
        for entity in server.endpoints.seen_by(request.caller).entities()
    ]


ROUTES = (
    Route(
        method="GET",
        path=ACCOUNT,
        handler=with_body(account),
        reply=AccountInfo,
        summary="The caller's key, what is left of its limits, and its prices",
    ),
)
