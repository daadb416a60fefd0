"""``GET /api/2.0/account``: what a key may know about itself: its scopes, what is left of its limits, its prices.

A front end whose end users are believed sees what is left of the limits of one of them too.
"""

from __future__ import annotations

import time
from typing import Any

from ...control.settings import ServerSettings
from ...frontend import end_users
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField, NotFound, PermissionDenied
from ...interface.labels import MAX_USER, Labels
from ...metering.accounts.accounts import Accounts
from ...metering.accounts.budget_alerts import alert_shares
from ...metering.accounts.limits import plain
from ...metering.accounts.money import currency
from ...metering.accounts.prices import plain as plain_price
from ...metering.accounts.prices import price_names
from ...metering.accounts.reply_types import AccountInfo
from ...metering.accounts.windows import UNITS
from ...metering.ledger.ledger import Ledger
from ...metering.ledger.limits_left import LimitLeft
from ..route import Route
from .paths import ACCOUNT

END_USER = "end_user"
QUERY: dict[str, dict[str, Any]] = {
    END_USER: {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_USER,
        "description": "An end user of the caller's, to see what is left of its limits: for the scope 'end_users'",
    }
}


def account(server: WorkerState, request: Request) -> Answer:
    """Respond with the caller's account. Raises ``NotFound`` without a ledger, and ``Unavailable``."""
    if server.ledger is None:
        raise NotFound("this server keeps no accounts; start it with --database")
    caller, ledger = request.caller, server.ledger
    end_user = _end_user(server, request)
    names = [one.endpoint for one in server.endpoints.seen_by(caller)]
    return json_answer(
        {
            "key_id": caller.key_id,
            "tenant": caller.tenant,
            "scopes": list(caller.scopes),
            "endpoints": None if caller.endpoints is None else list(caller.endpoints),
            "keys": _keys(server, request),
            "currency": currency(ledger.store),
            "limits": [_limit(left, server.settings) for left in ledger.limits_left(caller, names, end_user=end_user)],
            "prices": _prices(server, ledger, request),
        }
    )


def _end_user(server: WorkerState, request: Request) -> str:
    """Return the end user whose limits are asked for, "" if none is.

    The header of a front end goes before the parameter, which its user may have written, as in requests. Raises
    ``PermissionDenied`` for a caller whose end users are not believed, and ``InvalidField``.
    """
    given = request.single_parameters()
    for name, value in given.items():
        if name != END_USER:
            raise InvalidField(name[:80], value, f"no such parameter; expected {END_USER}")
        if not 0 < len(value) <= MAX_USER or "\0" in value:
            raise InvalidField(name, value, f"a text of 1 to {MAX_USER} characters")
    if given and not request.caller.names_end_users:
        raise PermissionDenied(f"{END_USER}: only a caller with the scope 'end_users' has end users with limits")
    named = end_users.named(server.settings.end_user_header, request, Labels(user=given.get(END_USER, "")))
    return named.user


def _keys(server: WorkerState, request: Request) -> list[dict[str, Any]]:
    """Return the caller's key; with the scope "usage", all keys of its tenant."""
    caller = request.caller
    assert server.ledger is not None
    found = Accounts(server.ledger.store, keys=server.keys).list_keys({"tenant": caller.tenant})["keys"]
    return [key for key in found if "usage" in caller.scopes or key["key_id"] == caller.key_id]


def _limit(left: LimitLeft, settings: ServerSettings) -> dict[str, Any]:
    limit, kind = left.limit, left.limit.kind
    return {
        "scope": limit.scope,
        "endpoint": left.endpoint or None,
        "end_user": left.end_user or None,
        "kind": kind,
        "unit": UNITS[kind],
        "soft": limit.soft,
        "alert_at": list(alert_shares(limit, settings.alert_shares)) if settings.webhooks else [],
        "allowed": plain(kind, limit.value),
        "used": plain(kind, left.used),
        "remaining": plain(kind, left.remaining),
        "reset_seconds": left.reset_after,
    }


def _prices(server: WorkerState, ledger: Ledger, request: Request) -> list[dict[str, Any]]:
    """Return the price now of each served model that the caller sees: a row of its usage would say it too."""
    now = time.time()
    return [
        {
            "endpoint": entity.endpoint,
            "served_model": entity.entity_shown_to(request.caller),
            **plain_price(ledger.prices.at(price_names(entity.entity, entity.identity, entity.endpoint), now)),
        }
        for entity in server.endpoints.seen_by(request.caller).entities()
    ]


ROUTES = (
    Route(
        method="GET",
        path=ACCOUNT,
        handler=with_body(account),
        query=QUERY,
        reply=AccountInfo,
        summary="The caller's key, what is left of its limits, and its prices",
    ),
)
