"""The request bodies and parameters for managing keys, limits and prices over HTTP, as readers with their schemas."""

from __future__ import annotations

import re
from typing import Any

from ...interface.errors import InvalidField
from ...interface.labels import MAX_USER
from ...interface.readers import (
    Entry,
    Reader,
    any_of,
    boolean,
    integer,
    list_of,
    number,
    one_of,
    reader,
    record,
    text,
)
from ..store.time_formats import DURATION, DURATION_ALLOWED, EXPIRY_ALLOWED, TIMESTAMP_ALLOWED
from .alert_shares import MAX_SHARE, MAX_SHARES, MIN_SHARE
from .audit import ACTIONS, MAX_PAGE
from .keys import ALLOWED_ENDPOINT, ENDPOINTS_ALLOWED, MAX_ENDPOINTS, MAX_WEIGHT, SCOPES
from .limits import MAX_VALUE
from .limits import SCOPES as LIMIT_SCOPES
from .money import AMOUNT, AMOUNT_ALLOWED, CURRENCY, CURRENCY_ALLOWED
from .windows import BUDGETS, KINDS, UNITS, Kind

_NO_CONTROL = r"[^\x00-\x1f\x7f]"


def _named(maximum: int, *, minimum: int = 1) -> Reader[str]:
    length = f"{minimum} to {maximum}" if minimum else f"at most {maximum}"
    allowed = f"a text of {length} characters, without control characters"
    return text(re.compile(f"{_NO_CONTROL}{{{minimum},{maximum}}}"), allowed)


_MOMENT = text(re.compile(r"[0-9A-Za-z:+. -]{1,40}"), EXPIRY_ALLOWED)
_SCOPES = list_of(one_of(*SCOPES), "one or more of " + ", ".join(SCOPES), minimum=1, maximum=len(SCOPES))
_ENDPOINT = text(re.compile(rf"\*|{ALLOWED_ENDPOINT.pattern}"), "endpoint or endpoint:adapter")
_ENDPOINTS = list_of(_ENDPOINT, ENDPOINTS_ALLOWED, minimum=1, maximum=MAX_ENDPOINTS)
_END_USER = text(
    re.compile(rf"[^\x00]{{1,{MAX_USER}}}", re.DOTALL), f"a text of 1 to {MAX_USER} characters, none of them NUL"
)
_MONEY = text(AMOUNT, f"{AMOUNT_ALLOWED}, as a text")
_SHARES = list_of(number(MIN_SHARE, MAX_SHARE), f"a list of at most {MAX_SHARES} shares", maximum=MAX_SHARES)


def _bound(kind: Kind) -> Reader[dict[str, Any]]:
    """Return a reader of a limit's value, alone or in an object with the limit's other fields."""
    value = _MONEY if kind in BUDGETS else integer(0, MAX_VALUE)
    whole = record(
        value=Entry(value, required="the value of the limit"),
        soft=Entry(boolean, "Whether it is only counted, and refuses nothing (false)"),
        alert_at=Entry(_SHARES, "Shares of it at which webhooks are told (those of the server, for budgets)"),
    )

    @reader(**any_of(value.schema, whole.schema))
    def read(given: Any, path: str) -> dict[str, Any]:
        return whole(given, path) if isinstance(given, dict) else {"value": value(given, path)}

    return read


_LIMIT_VALUES = record(
    **{kind: Entry(_bound(kind), f"{'Money ' if kind in BUDGETS else ''}{UNITS[kind]}") for kind in KINDS}
)


@reader(**_LIMIT_VALUES.schema)
def _limits(value: Any, path: str) -> dict[str, dict[str, Any]]:
    found = _LIMIT_VALUES(value, path)
    if not found:
        raise InvalidField(path, value, "one or more of " + ", ".join(KINDS))
    return found


_KEY_FIELDS = {
    "name": Entry(_named(256, minimum=0), "A note for people"),
    "scopes": Entry(_SCOPES, "What the key may do"),
    "expires": Entry(_MOMENT, EXPIRY_ALLOWED),
    "endpoints": Entry(_ENDPOINTS, 'What it may use: endpoint, or endpoint:adapter; ["*"] is everything'),
    "weight": Entry(integer(1, MAX_WEIGHT), "Its share of an engine beside other tenants' keys (1)"),
}
NEW_KEY = record(
    tenant=Entry(_named(128), "Who pays", required="the tenant of the key"),
    limits=Entry(_limits, "What the key may use"),
    **_KEY_FIELDS,
)
KEY_CHANGES = record(**_KEY_FIELDS)
ROTATION = record(
    overlap=Entry(text(DURATION, DURATION_ALLOWED), "How long the old secret remains valid (24h)"),
    expires=Entry(_MOMENT, EXPIRY_ALLOWED),
)
NEW_LIMITS = record(
    scope=Entry(one_of(*LIMIT_SCOPES), required="one of " + ", ".join(LIMIT_SCOPES)),
    subject=Entry(_named(256), "A key's id, a tenant, an endpoint", required="whom the limits are for"),
    end_user=Entry(
        _END_USER, "With the scope of end users: the one whose own limits these are; not given, each of them"
    ),
    limits=Entry(_limits, required="one or more limits"),
)
NEW_PRICE = record(
    entity=Entry(_named(256), 'A served model\'s name, or "*"', required="a served model's name, or *"),
    input=Entry(_MONEY, "Price of a million prompt tokens (0)"),
    cached=Entry(_MONEY, "Price of a million of them found in the cache (as input)"),
    output=Entry(_MONEY, "Price of a million generated tokens (0)"),
    unit_minute=Entry(_MONEY, "Price of a reserved token/s for a minute (0)"),
    effective=Entry(_MOMENT, f"When the price takes effect (now): {TIMESTAMP_ALLOWED}"),
)
NEW_CURRENCY = record(currency=Entry(text(CURRENCY, CURRENCY_ALLOWED), required=CURRENCY_ALLOWED))

# query parameters
_NAME = {"type": "string", "minLength": 1, "maxLength": 256}
_WHEN = {"type": "string", "description": TIMESTAMP_ALLOWED}
KEYS_QUERY: dict[str, dict[str, Any]] = {"tenant": _NAME}
LIMITS_QUERY: dict[str, dict[str, Any]] = {"scope": {"enum": list(LIMIT_SCOPES)}, "subject": _NAME}
LIMIT_QUERY: dict[str, dict[str, Any]] = {**LIMITS_QUERY, "end_user": _NAME, "kind": {"enum": list(KINDS)}}
PRICES_QUERY: dict[str, dict[str, Any]] = {"entity": _NAME}
PRICE_QUERY: dict[str, dict[str, Any]] = {
    "entity": _NAME,
    "effective_ms": {"type": "integer", "minimum": 0, "description": "That price alone, in place of all of the entity"},
}
AUDIT_QUERY: dict[str, dict[str, Any]] = {
    "start": _WHEN,
    "end": _WHEN,
    "actor": _NAME,
    "action": {"enum": list(ACTIONS)},
    "target": {"type": "string", "minLength": 1, "maxLength": 512},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "description": "Entries per page (100)"},
    "cursor": {"type": "string", "description": "next_cursor of the previous page"},
}
