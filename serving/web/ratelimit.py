"""``x-ratelimit-*`` headers, as OpenAI's API has them, of the limits that an admission was checked against."""

from __future__ import annotations

from collections.abc import Iterable

from ..metering.limits import LimitStatus

NOUNS = {"itpm": "tokens", "otpm": "tokens", "qpm": "requests", "qph": "requests"}


def headers(limits: Iterable[LimitStatus], now: float) -> dict[str, str]:
    """Limit, what remains of it, and seconds until it is wholly free, for tokens and for requests.

    Of several limits on the same thing the one with the least left is told. ``now`` is seconds since the epoch.
    """
    strictest: dict[str, LimitStatus] = {}
    for status in limits:
        noun = NOUNS.get(status.kind)
        if noun is not None and (noun not in strictest or status.remaining < strictest[noun].remaining):
            strictest[noun] = status
    found = {}
    for noun, status in strictest.items():
        found[f"x-ratelimit-limit-{noun}"] = str(status.allowed)
        found[f"x-ratelimit-remaining-{noun}"] = str(status.remaining)
        if status.reset_at is not None:
            found[f"x-ratelimit-reset-{noun}"] = f"{max(0, round(status.reset_at - now))}s"
    return found
