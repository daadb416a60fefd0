"""Durations and timestamps as people write them: ``90d``, ``2027-01-01``, ``never``."""

from __future__ import annotations

import datetime
import re

from ...interface.errors import InvalidField

DURATION = re.compile(r"([1-9][0-9]{0,8})(s|m|h|d|w)|0")
DURATION_ALLOWED = "a length of time such as 90d, 12h, 30m, 10s or 0"
EXPIRY_ALLOWED = "a length of time such as 90d or 12h, a day (2027-01-01), an ISO 8601 time, or never"
TIMESTAMP_ALLOWED = "a day (2026-11-21), an ISO 8601 time (UTC where it names no zone) or milliseconds since the epoch"
NEVER = "never"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MAX_DURATION = datetime.timedelta(days=100 * 365)
_END_MS = 253_402_300_800_000  # the year 10000, which ``datetime`` cannot represent


def parse_duration(field: str, value: str, allowed: str = DURATION_ALLOWED) -> int:
    """Return the seconds of a duration: ``"12h"`` is 43_200. Raises ``InvalidField``, also above 100 years."""
    found = DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise InvalidField(field, value, allowed)
    if found[1] is None:
        return 0
    try:
        length = datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise InvalidField(field, value, allowed) from None
    if length > _MAX_DURATION:
        raise InvalidField(field, value, allowed)
    return int(length.total_seconds())


def parse_expiry(field: str, value: str, now_ms: int) -> int | None:
    """Return a future time in milliseconds since the epoch; None for never.

    ``value`` is a duration from ``now_ms`` on, a timestamp, or ``never``. Raises ``InvalidField``.
    """
    if value == NEVER:
        return None
    if isinstance(value, str) and DURATION.fullmatch(value):
        at = now_ms + parse_duration(field, value, EXPIRY_ALLOWED) * 1000
    else:
        at = parse_timestamp(field, value, EXPIRY_ALLOWED) or 0
    if at <= now_ms:
        raise InvalidField(field, value, f"a future time: {EXPIRY_ALLOWED}")
    return at


def parse_timestamp(field: str, value: str | None, allowed: str = TIMESTAMP_ALLOWED) -> int | None:
    """Convert an ISO 8601 time, or a number of milliseconds, to milliseconds since the epoch; None stays None.

    Raises ``InvalidField``.
    """
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
    if not 0 <= found < _END_MS:
        raise InvalidField(field, value, allowed)
    return found


def format_utc(at_ms: int | None) -> str:
    """Format milliseconds since the epoch in UTC, as ``2026-11-21 09:30:00``; "" for None."""
    if at_ms is None:
        return ""
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")
