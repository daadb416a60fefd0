"""JSON values that a schema lists: their types, and equality as in JSON Schema."""

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
    """Return a hashable key that is equal for equal values: 1 equals 1.0, but True does not equal 1."""
    if isinstance(value, dict):
        return "object", frozenset((name, key(entry)) for name, entry in value.items())
    if isinstance(value, list | tuple):
        return "array", tuple(map(key, value))
    return ("boolean", value) if isinstance(value, bool) else value


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({key(value): value for value in values}.values())


def can_be_written(value: Any) -> bool:
    """Return False for numbers that no double equals, and for strings with control characters that have no short
    escape in JSON."""
    if isinstance(value, dict):
        return all(can_be_written(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(can_be_written, value))
    if isinstance(value, str):
        return not any((char < " " and char not in SPELLED) or char == "\x7f" for char in value)
    if isinstance(value, float):
        return abs(value) < 1 << 53  # a larger one is written with different digits
    return not isinstance(value, int) or (abs(value) < 1 << 63 and int(float(value)) == value)
