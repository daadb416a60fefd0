"""Money: integer micro-units, one rounding a request.

A price is micro-units per million tokens, so that 3.00 a million tokens is 3_000_000 and one token costs 3 micro-units.
"""

from __future__ import annotations

from msgspec import Struct

MILLION = 1_000_000


class Price(Struct, frozen=True, kw_only=True):
    """Micro-units per million input, cached input and output tokens, and per reserved token/s and minute."""

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
    """Micro-units of one request: the exact sum over its tokens, rounded half up once.

    ``cached`` of the ``prompt`` tokens pay the cached price. The result grows with every count, so that a settled
    cost is never above the reserved one.
    """
    exact = (prompt - cached) * price.input + cached * price.cached + completion * price.output
    return (exact + MILLION // 2) // MILLION
