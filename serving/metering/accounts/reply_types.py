"""Keys, limits, prices and the audit log as the management API returns them, as types: the OpenAPI document has their
schemas."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from ...interface.type_schema import form, sent_form
from .audit import AuditEntry
from .keys import ApiKey
from .limits import Limit
from .money import Price

Money = Annotated[str, Meta(description="a decimal number, in currency units")]
Notes = Annotated[list[str], Meta(description="likely mistakes")]
KeyInfo = sent_form("KeyInfo", "A key without its secret.", ApiKey, state=Literal["active", "expired", "revoked"])
LimitInfo = sent_form("LimitInfo", "A limit; money is a decimal string.", Limit, value=int | Money, unit=str)
PriceInfo = form(
    "PriceInfo",
    "Prices per million tokens, and per provisioned token/s for a minute, from a time on.",
    {"entity": str, "effective_ms": int, **dict.fromkeys(Price.__struct_fields__, Money)},
)


class NewKey(TypedDict):
    """A new key, and its secret, which is shown this once."""

    secret: str
    key: KeyInfo  # type: ignore[valid-type]
    notes: Notes


class KeyList(TypedDict):
    keys: list[KeyInfo]  # type: ignore[valid-type]


class OneKey(TypedDict):
    key: KeyInfo  # type: ignore[valid-type]


class ChangedKey(OneKey):
    notes: Notes


class RotatedKey(TypedDict):
    """A key, and its new secret, which is shown this once."""

    secret: str
    key: KeyInfo  # type: ignore[valid-type]


class LimitList(TypedDict):
    currency: str
    limits: list[LimitInfo]  # type: ignore[valid-type]


class ChangedLimits(LimitList):
    notes: Notes


class PriceList(TypedDict):
    currency: str
    prices: list[PriceInfo]  # type: ignore[valid-type]


class ChangedPrice(TypedDict):
    currency: str
    price: PriceInfo  # type: ignore[valid-type]
    notes: Notes


class CurrencyInfo(TypedDict):
    """The currency, empty until one is set."""

    currency: str


class LimitLeftInfo(TypedDict):
    """The rest of a limit; ``reset_seconds`` is the time until all of it is free again, null if it never is. A ``soft``
    limit refuses nothing: more than is ``allowed`` may be ``used``. ``alert_at`` are the shares at which webhooks are
    told, those of the server included. ``end_user`` is null but for limits of the end user that was asked for."""

    scope: str
    endpoint: str | None
    end_user: str | None
    kind: str
    unit: str
    soft: bool
    alert_at: list[float]
    allowed: int | Money
    used: int | Money
    remaining: int | Money
    reset_seconds: int | None


PriceNow = form(
    "PriceNow",
    "The prices of a served model, in currency units.",
    {"endpoint": str, "served_model": str, **dict.fromkeys(Price.__struct_fields__, Money)},
)


class AccountInfo(TypedDict):
    """A key, what is left of its limits, and its prices; ``endpoints`` of null are all."""

    key_id: str | None
    tenant: str
    scopes: list[str]
    endpoints: list[str] | None
    keys: list[KeyInfo]  # type: ignore[valid-type]
    currency: str
    limits: list[LimitLeftInfo]
    prices: list[PriceNow]  # type: ignore[valid-type]


class AuditPage(TypedDict):
    """A page of the audit log. A ``next_cursor`` of null means that this is the last page so far."""

    audit: list[AuditEntry]
    next_cursor: str | None
