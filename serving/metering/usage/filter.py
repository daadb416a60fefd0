"""Parse filters and groups of usage from query parameters or a command's options."""

from __future__ import annotations

from collections.abc import Mapping

from ...interface.errors import InvalidField
from ..store.time_formats import parse_timestamp
from .usage import GROUPS, GroupBy, UsageFilter

MAX_NAME = 256
STATUSES = ("open", "ok", "error", "aborted", "recovered")
NAMES = ("tenant", "endpoint", "entity", "key_id", "status")


def filter_of(asked: Mapping[str, str | None]) -> UsageFilter:
    """Return a filter with ``start`` (included), ``end`` (excluded) and names to match; a missing one matches all.

    Raises ``InvalidField``.
    """
    start_ms, end_ms = parse_timestamp("start", asked.get("start")), parse_timestamp("end", asked.get("end"))
    if start_ms is not None and end_ms is not None and end_ms < start_ms:
        raise InvalidField("end", asked["end"], "a time that is not before start")
    found: dict[str, str] = {}
    for name in NAMES:
        value = asked.get(name)
        if value is None:
            continue
        if not 0 < len(value) <= MAX_NAME or "\0" in value:
            raise InvalidField(name, value, f"a name of 1 to {MAX_NAME} characters")
        found[name] = value
    if found.get("status", "ok") not in STATUSES:
        raise InvalidField("status", found["status"], "one of " + ", ".join(STATUSES))
    return UsageFilter(start_ms=start_ms or 0, end_ms=end_ms, **found)


def groups_of(value: str) -> tuple[GroupBy, ...]:
    """Parse columns to sum by, such as ``"day,tenant"``. Raises ``InvalidField``."""
    asked = [name.strip() for name in value.split(",")]
    found = tuple(group for name in asked for group in GROUPS if group == name)
    if len(found) != len(asked) or len(set(found)) != len(found):
        raise InvalidField("by", value, "one or more of " + ", ".join(GROUPS) + ", each once")
    return found
