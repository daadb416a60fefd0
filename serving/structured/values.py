"""Values of JSON that a schema names one by one: equal as JSON Schema has it, and of which type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SPELLED = {"\b", "\f", "\n", "\r", "\t"}  # control characters that have an escape of their own


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def is_of(value: Any, types: Iterable[str]) -> bool:
    own = type_of(value)
    return own in types or (own == "integer" and "number" in types)


def key(value: Any) -> Any:
    """Equal for equal values: 1 is 1.0, and True is not 1; hashable."""
    if isinstance(value, dict):
        return "object", frozenset((name, key(entry)) for name, entry in value.items())
    if isinstance(value, list | tuple):
        return "array", tuple(map(key, value))
    return ("boolean", value) if isinstance(value, bool) else value


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({key(value): value for value in values}.values())


def can_be_written(value: Any) -> bool:
    """False for numbers that no double is equal to, and texts with control characters that JSON escapes by number."""
    if isinstance(value, dict):
        return all(can_be_written(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(can_be_written, value))
    if isinstance(value, str):
        return not any((char < " " and char not in SPELLED) or char == "\x7f" for char in value)
    if isinstance(value, float):
        return abs(value) < 1 << 53  # a larger one is written with other digits than its own
    return not isinstance(value, int) or (abs(value) < 1 << 63 and int(float(value)) == value)
