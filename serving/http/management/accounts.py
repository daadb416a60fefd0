"""Serve keys, limits, prices and the audit log (``metering.accounts``) over HTTP, for callers with scope ``manage``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ...interface.readers import Reader
from ...metering.accounts.accounts import Accounts
from ...metering.accounts.bodies import (
    AUDIT_QUERY,
    KEY_CHANGES,
    KEYS_QUERY,
    LIMIT_QUERY,
    LIMITS_QUERY,
    NEW_CURRENCY,
    NEW_KEY,
    NEW_LIMITS,
    NEW_PRICE,
    PRICE_QUERY,
    PRICES_QUERY,
    ROTATION,
)
from ...metering.accounts.reply_types import (
    AuditPage,
    ChangedKey,
    ChangedLimits,
    ChangedPrice,
    CurrencyInfo,
    KeyList,
    LimitList,
    NewKey,
    OneKey,
    PriceList,
    RotatedKey,
)
from ..route import NoFields, Route
from .paths import AUDIT, CURRENCY, KEYS, LIMITS, PRICES

KEY = f"{KEYS}/<name>"
SECRET_HEADERS = {"Cache-Control": "no-store"}


def _accounts(server: WorkerState, request: Request) -> Accounts:
    if server.ledger is None:
        raise NotFound("this server has no keys, limits and prices of its own; start it with --database")
    return Accounts(server.ledger.store, by=request.actor, keys=server.keys)


def _route(
    method: str,
    path: str,
    call: Callable[..., dict[str, Any]],
    summary: str,
    reply: Any,
    *,
    body: Reader[Any] | None = None,
    query: Mapping[str, dict[str, Any]] | None = None,
    secret: bool = False,
    example: Mapping[str, Any] | None = None,
) -> Route:
    """Make a route that calls ``call``.

    ``call`` gets ``Accounts``, then the name in the path, the body and the query parameters, whichever the route has.
    ``secret`` says that the response has a secret, which no cache may store.
    """

    def handler(server: WorkerState, request: Request) -> Answer:
        arguments: list[Any] = [request.name] if "<name>" in path else []
        if body is not None:
            arguments.append(request.json())
        if query is not None:
            arguments.append(request.single_parameters())
        return json_answer(call(_accounts(server, request), *arguments), headers=SECRET_HEADERS if secret else None)

    return Route(
        method=method,
        path=path,
        handler=with_body(handler),
        summary=summary,
        auth=Auth.MANAGE,
        body=body,
        query=query or {},
        reply=reply,
        example=example or {},
    )


ROUTES = (
    _route(
        "POST",
        KEYS,
        Accounts.create_key,
        "Create an API key; its secret is shown this once",
        NewKey,
        example={"tenant": "search", "name": "nightly job", "scopes": ["invoke"], "limits": {"otpm": 20000}},
        body=NEW_KEY,
        secret=True,
    ),
    _route("GET", KEYS, Accounts.list_keys, "All API keys, without their secrets", KeyList, query=KEYS_QUERY),
    _route("GET", KEY, Accounts.get_key, "One API key", OneKey),
    _route(
        "PATCH",
        KEY,
        Accounts.update_key,
        "Change a key's permissions and expiry",
        ChangedKey,
        example={"scopes": ["invoke", "usage"]},
        body=KEY_CHANGES,
    ),
    _route("DELETE", KEY, Accounts.revoke_key, "Revoke a key and all its secrets permanently", OneKey),
    _route(
        "POST",
        f"{KEY}/rotate",
        Accounts.rotate_key,
        "Rotate a key's secret; the old one expires after the overlap",
        RotatedKey,
        example={"overlap": "1h"},
        body=ROTATION,
        secret=True,
    ),
    _route(
        "GET",
        LIMITS,
        Accounts.list_limits,
        "Limits of keys, tenants, endpoints and their users",
        LimitList,
        query=LIMITS_QUERY,
    ),
    _route(
        "PUT",
        LIMITS,
        Accounts.set_limits,
        "Set limits; the subject's other limits are kept",
        ChangedLimits,
        example={"scope": "tenant", "subject": "search", "limits": {"qpm": 600, "budget_month": "25.00"}},
        body=NEW_LIMITS,
    ),
    _route("DELETE", LIMITS, Accounts.delete_limit, "Remove a limit", NoFields, query=LIMIT_QUERY),
    _route("GET", PRICES, Accounts.list_prices, "Prices and the times they took effect", PriceList, query=PRICES_QUERY),
    _route(
        "PUT",
        PRICES,
        Accounts.set_price,
        "Set a price",
        ChangedPrice,
        example={"entity": "assistant-1", "input": "0.20", "output": "0.60"},
        body=NEW_PRICE,
    ),
    _route("DELETE", PRICES, Accounts.delete_price, "Remove the prices of a served model", NoFields, query=PRICE_QUERY),
    _route("GET", CURRENCY, Accounts.get_currency, "The currency of prices, budgets and costs", CurrencyInfo),
    _route(
        "PUT",
        CURRENCY,
        Accounts.set_currency,
        "Set the currency before the first cost is recorded",
        CurrencyInfo,
        example={"currency": "EUR"},
        body=NEW_CURRENCY,
    ),
    _route("GET", AUDIT, Accounts.list_audit, "Audit log, newest first", AuditPage, query=AUDIT_QUERY),
)
