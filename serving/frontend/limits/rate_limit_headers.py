"""``x-ratelimit-*`` headers, in the form of OpenAI's API, for the limits that an admission was checked against.

``tokens`` and ``requests`` show the strictest of all limits on tokens and on requests; ``input-tokens``,
``output-tokens`` and the others show the limit of one kind. Soft limits are named in a header of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...interface.errors import LimitExceeded
from ...metering.accounts.limits import Limit, LimitStatus, plain
from ...metering.accounts.money import units

SOFT_EXCEEDED = "x-ratelimit-soft-exceeded"
NOUNS = {
    "itpm": ("input-tokens", "tokens"),
    "otpm": ("output-tokens", "tokens"),
    "qpm": ("requests",),
    "qph": ("requests",),
    "in_flight": ("concurrent-requests",),
    "budget": ("budget",),
    "budget_day": ("budget",),
    "budget_month": ("budget",),
}


def headers(limits: Iterable[LimitStatus]) -> dict[str, str]:
    """Return headers for each limit: its value, what remains, and the seconds until it is completely free.

    Of several limits on the same thing, the one with the least left is shown. A budget is money, as a decimal string.
    """
    strictest: dict[str, LimitStatus] = {}
    for status in limits:
        for noun in NOUNS[status.kind]:
            if noun not in strictest or status.remaining < strictest[noun].remaining:
                strictest[noun] = status
    found: dict[str, str] = {}
    for noun, status in strictest.items():
        allowed, remaining = plain(status.kind, status.allowed), plain(status.kind, status.remaining)
        found |= _of(noun, allowed, remaining, status.reset_after)
    return found


def exceeded(soft: Iterable[Limit]) -> dict[str, str]:
    """Return the header that names the soft limits beyond which a request was admitted, if there are any."""
    named = ", ".join(f"{limit.scope} {limit.kind}" for limit in soft)
    return {SOFT_EXCEEDED: named} if named else {}


def refused(error: LimitExceeded) -> dict[str, str]:
    """Return these headers for the limit that refused a request; the reset is when this request would be admitted."""
    if error.allowed is None or error.remaining is None:
        return {}
    found: dict[str, str] = {}
    for noun in NOUNS.get(error.limit, ()):
        shown = units if noun == "budget" else str
        found |= _of(noun, shown(error.allowed), shown(error.remaining), error.retry_after)
    return found


def _of(noun: str, allowed: int | str, remaining: int | str, reset: float | None) -> dict[str, str]:
    found = {f"x-ratelimit-limit-{noun}": str(allowed), f"x-ratelimit-remaining-{noun}": str(remaining)}
    if reset is not None:
        found[f"x-ratelimit-reset-{noun}"] = f"{max(0, round(reset))}s"
    return found
