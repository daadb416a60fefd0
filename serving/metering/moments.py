"""Moments and lengths of time as people write them: ``90d``, ``2027-01-01``, ``never``."""

from __future__ import annotations

import datetime
import re

from ..errors import InvalidField

LENGTH = re.compile(r"([1-9][0-9]{0,8})(s|m|h|d|w)|0")
LENGTH_ALLOWED = "a length of time such as 90d, 12h, 30m, 10s or 0"
EXPIRY_ALLOWED = "a length of time such as 90d or 12h, a day (2027-01-01), an ISO 8601 time, or never"
TIME = "a day (2026-11-21), an ISO 8601 time (UTC where it names no zone) or milliseconds since the epoch"
NEVER = "never"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
END_MS = 253_402_300_800_000  # the year 10000, which no date here can show
MAX_SECONDS = 100 * 365 * 86_400


def seconds_of(field: str, value: str, allowed: str = LENGTH_ALLOWED) -> int:
    """``"12h"`` as 43_200. Raises ``InvalidField``."""
    found = LENGTH.fullmatch(value) if isinstance(value, str) else None
    seconds = 0 if found is None or found[1] is None else int(found[1]) * _SECONDS[found[2]]
    if found is None or seconds > MAX_SECONDS:
        raise InvalidField(field, value, allowed)
    return seconds


def expiry_of(field: str, value: str, now_ms: int) -> int | None:
    """Milliseconds since the epoch of a moment to come, None for never. Raises ``InvalidField``."""
    if value == NEVER:
        return None
    if isinstance(value, str) and LENGTH.fullmatch(value):
        at = now_ms + seconds_of(field, value, EXPIRY_ALLOWED) * 1000
    else:
        at = time_of(field, value, EXPIRY_ALLOWED) or 0
    if at <= now_ms:
        raise InvalidField(field, value, f"a moment to come: {EXPIRY_ALLOWED}")
    return at


def time_of(field: str, value: str | None, allowed: str = TIME) -> int | None:
    """Milliseconds since the epoch. Raises ``InvalidField``."""
    if value is None:
        return None
    if value.isascii() and value.isdigit() and len(value) > 8:
        found = int(value) if len(value) < 20 else -1
    else:
        try:
            moment = datetime.datetime.fromisoformat(value)
            found = int(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1000)
        except (ValueError, OverflowError):
            raise InvalidField(field, value, allowed) from None
    if not 0 <= found < END_MS:
        raise InvalidField(field, value, allowed)
    return found


def shown(at_ms: int | None) -> str:
    """UTC, to the second."""
    if at_ms is None:
        return ""
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")
