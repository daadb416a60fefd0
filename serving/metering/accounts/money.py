"""Money: integer micro-units, rounded once per request; decimal strings in the API.

A price is in micro-units per million tokens: 3.00 per million tokens is 3_000_000, and one token costs 3 micro-units.
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import Conflict, InvalidField
from ..store.store import Store
from ..store.tables import folded, ledger, provisioned_minutes, settings
from .audit import Actor, record

MILLION = 1_000_000
AMOUNT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?|1000000000|\.[0-9]{1,6}")
AMOUNT_ALLOWED = "a number from 0 to 10**9 with at most 6 decimals"
WRITTEN = re.compile(r"(-?)([0-9]+)\.([0-9]{2,6})")
CURRENCY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,15}")
CURRENCY_ALLOWED = "a currency such as EUR: 1 to 16 letters, digits, dashes and underscores, a letter first"


class Price(Struct, frozen=True, kw_only=True):
    """Micro-units per million input, cached input and output tokens, and per minute of a provisioned token/s."""

    input: int = 0
    cached: int = 0
    output: int = 0
    unit_minute: int = 0

    def __post_init__(self) -> None:
        for name in ("input", "cached", "output", "unit_minute"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10**15:
                raise ValueError(f"{name}: {value!r} is not an integer number of micro-units from 0 to 10**15")
        if self.cached > self.input:
            raise ValueError("cached: a cached token may not cost more than an input token (the reservation covers it)")


FREE = Price()


def cost(price: Price, *, prompt: int, cached: int, completion: int) -> int:
    """Return the cost of one request in micro-units: the exact sum over its tokens, rounded half up once.

    ``cached`` of the ``prompt`` tokens pay the cached price. The result grows with every count, so that a settled cost
    is never above the reserved one.
    """
    exact = (prompt - cached) * price.input + cached * price.cached + completion * price.output
    return (exact + MILLION // 2) // MILLION


def micro_units(field: str, value: str) -> int:
    """Convert a decimal string to micro-units: ``"2.50"`` is 2_500_000. Raises ``InvalidField``."""
    if not isinstance(value, str) or not AMOUNT.fullmatch(value):
        raise InvalidField(field, value, AMOUNT_ALLOWED)
    whole, _, decimals = value.partition(".")
    return int(whole or "0") * MILLION + int(decimals.ljust(6, "0"))


def units(micro: int) -> str:
    """Convert micro-units to a decimal string with at least two decimals: 2_500_000 is ``"2.50"``."""
    whole, rest = divmod(abs(micro), MILLION)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micro < 0 else ''}{whole}.{decimals}"


def micro_units_of(amount: str) -> int:
    """Convert what ``units`` has written, of any size. Raises ``ValueError``."""
    if not isinstance(amount, str) or not (found := WRITTEN.fullmatch(amount)):
        raise ValueError(f"{amount!r} is not an amount of money")
    sign, whole, decimals = found.groups()
    return int(f"{sign}{whole}{decimals.ljust(6, '0')}")


def money(micro: int, currency: str) -> str:
    """Format micro-units with their currency, ``"2.50 EUR"``, or as a bare number if there is none."""
    return f"{units(micro)} {currency}".rstrip()


def currency_of(connection: sa.Connection) -> str:
    """Return the currency of all prices, budgets and costs of the store; empty while none is set."""
    found = connection.execute(sa.select(settings.c.value).where(settings.c.name == "currency")).scalar_one_or_none()
    return found or ""


def currency(store: Store) -> str:
    return store.read(currency_of)


def _has_costs(connection: sa.Connection) -> bool:
    tables = (ledger, folded, provisioned_minutes)
    queries = (sa.select(sa.true()).select_from(table).where(table.c.cost > 0).limit(1) for table in tables)
    return any(connection.execute(query).first() is not None for query in queries)


def set_currency(store: Store, value: str, *, by: Actor | None = None) -> None:
    """Set the currency. Raises ``InvalidField``, or ``Conflict`` if costs were booked in another currency: changing the
    name would convert nothing."""
    if not isinstance(value, str) or not CURRENCY.fullmatch(value):
        raise InvalidField("currency", value, CURRENCY_ALLOWED)

    def work(connection: sa.Connection) -> None:
        before = currency_of(connection)
        if before not in ("", value) and _has_costs(connection):
            raise Conflict(f"currency: costs are booked in {before}, and another name would not convert them")
        insert = store.insert(settings).values(name="currency", value=value)
        connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_={"value": value}))
        record(connection, by, "currency.set", value, before=before or None, after=value)

    store.write(work)
