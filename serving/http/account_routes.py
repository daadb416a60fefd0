"""The routes by which keys, limits, prices and the audit log are managed: for the scope ``manage``, all of them."""

from __future__ import annotations

from typing import Any

from ..metering.account_bodies import (
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
from ..readers import Reader

KEYS = "/api/2.0/keys"
KEY = f"{KEYS}/<name>"
LIMITS = "/api/2.0/limits"
PRICES = "/api/2.0/prices"
CURRENCY = "/api/2.0/currency"
AUDIT = "/api/2.0/audit"

# (method, path, handler, summary, reader of the body, parameters)
TABLE: tuple[tuple[str, str, str, str, Reader[Any] | None, dict[str, dict[str, Any]]], ...] = (
    ("POST", KEYS, "create_key", "Create an API key; its secret is told this once", NEW_KEY, {}),
    ("GET", KEYS, "list_keys", "All API keys, without their secrets", None, KEYS_QUERY),
    ("GET", KEY, "get_key", "One API key", None, {}),
    ("PATCH", KEY, "update_key", "Change what a key may do, and until when", KEY_CHANGES, {}),
    ("DELETE", KEY, "revoke_key", "Revoke a key and all its secrets, for ever", None, {}),
    ("POST", f"{KEY}/rotate", "rotate_key", "A new secret for a key; the old one ends after the overlap", ROTATION, {}),
    ("GET", LIMITS, "list_limits", "Limits of keys, tenants, endpoints and their users", None, LIMITS_QUERY),
    ("PUT", LIMITS, "set_limits", "Set limits; others of the same subject stay", NEW_LIMITS, {}),
    ("DELETE", LIMITS, "delete_limit", "Take a limit away", None, LIMIT_QUERY),
    ("GET", PRICES, "list_prices", "Prices, and since when they hold", None, PRICES_QUERY),
    ("PUT", PRICES, "set_price", "Set a price", NEW_PRICE, {}),
    ("DELETE", PRICES, "delete_price", "Take the prices of a served model away", None, PRICE_QUERY),
    ("GET", CURRENCY, "get_currency", "The currency of prices, budgets and costs", None, {}),
    ("PUT", CURRENCY, "set_currency", "Name the currency, before the first cost is booked", NEW_CURRENCY, {}),
    ("GET", AUDIT, "list_audit", "Who changed what, the newest first", None, AUDIT_QUERY),
)
