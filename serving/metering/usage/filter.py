"""Parse filters and groups of usage from query parameters or a command's options."""

from __future__ import annotations

from collections.abc import Mapping

from ...interface.errors import InvalidField
from ...interface.labels import MAX_TAG_VALUE
from ..store.time_formats import parse_timestamp
from .usage import ALLOWED_GROUPS, LABELS, GroupBy, UsageFilter, is_group, is_selectable

MAX_NAME = 256
MAX_VERSION = 512  # the name of a registered model, and its version
STATUSES = ("open", "ok", "error", "aborted", "recovered")
NAMES = ("tenant", "endpoint", "entity", "key_id", "status", *LABELS)


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
        max_length = MAX_VERSION if name == "model_version" else MAX_NAME
        if not 0 < len(value) <= max_length or "\0" in value:
            raise InvalidField(name, value, f"a name of 1 to {max_length} characters")
        found[name] = value
    if found.get("status", "ok") not in STATUSES:
        raise InvalidField("status", found["status"], "one of " + ", ".join(STATUSES))
    return UsageFilter(start_ms=start_ms or 0, end_ms=end_ms, tag=_tag_of(asked.get("tag")), **found)


def _tag_of(value: str | None) -> tuple[str, str] | None:
    """Parse ``"team=search"``: a tag's name, which has no "=" here, and its value."""
    if value is None:
        return None
    name, equals, text = value.partition("=")
    if not equals or not is_selectable(name) or len(text) > MAX_TAG_VALUE or "\0" in text:
        allowed = "NAME=VALUE, a tag and its value; the name is printable, without quotation marks and backslashes"
        raise InvalidField("tag", value, allowed)
    return name, text


def groups_of(value: str) -> tuple[GroupBy, ...]:
    """Parse columns to sum by, such as ``"day,tenant,tags.team"``. Raises ``InvalidField``."""
    found = tuple(name.strip() for name in value.split(","))
    if not all(map(is_group, found)) or len(set(found)) != len(found):
        raise InvalidField("by", value, f"one or more of {ALLOWED_GROUPS}, each once")
    return found
