"""Shares of limits at which webhooks are told: read from texts, and checked."""

from __future__ import annotations

from collections.abc import Iterable

from ...interface.errors import InvalidField

MIN_SHARE, MAX_SHARE = 0.001, 10.0
MAX_SHARES = 10
SHARES_ALLOWED = f"at most {MAX_SHARES} shares from {MIN_SHARE:g} to {MAX_SHARE:g}, separated by commas: 0.5,0.8,1"


def parse_shares(field: str, text: str) -> tuple[float, ...]:
    """Return the shares in a text such as "0.5,0.8,1". Raises ``InvalidField``."""
    try:
        return checked_shares(field, [float(share) for share in text.split(",") if share.strip()])
    except ValueError:
        raise InvalidField(field, text, SHARES_ALLOWED) from None


def checked_shares(field: str, given: Iterable[float]) -> tuple[float, ...]:
    """Return shares in ascending order, each once. Raises ``InvalidField``."""
    found = tuple(given)
    if len(found) > MAX_SHARES or not all(MIN_SHARE <= share <= MAX_SHARE for share in found):
        raise InvalidField(field, ",".join(f"{share:g}" for share in found), SHARES_ALLOWED)
    return tuple(sorted({round(share, 3) for share in found}))
