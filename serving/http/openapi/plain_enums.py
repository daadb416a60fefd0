"""Enumerations as generators of clients understand them: those of one type, of which they make a class each.

Fields that accept only what asks for nothing, such as null, false and [], have enumerations of several types.
"""

from __future__ import annotations

from typing import Any

_EMPTY = {list: {"type": "array", "maxItems": 0}, dict: {"type": "object", "maxProperties": 0}}
_LITERAL = ("example", "examples", "enum", "const", "default")  # keywords whose values are no schemas
_NAMED = ("properties", "schemas", "$defs")  # keywords whose keys are names


def plain_enums(schema: Any) -> Any:
    """Return ``schema`` with each enumeration of several types as a choice between one of each type."""
    if isinstance(schema, list):
        return [plain_enums(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: plain_enums(entry) for name, entry in value.items()}
        else:
            found[key] = value if key in _LITERAL else plain_enums(value)
    values = found.get("enum")
    if not isinstance(values, list) or all(isinstance(value, str) for value in values) or _contains_more(values):
        return found
    rest = {key: value for key, value in found.items() if key not in ("enum", "type")}
    options = [_of_type(values, kind) for kind in dict.fromkeys(map(type, values))]
    return {**rest, **options[0]} if len(options) == 1 else {**rest, "anyOf": options}


def _contains_more(values: list[Any]) -> bool:
    """Return whether there is a list or an object that is not empty, of which the schema would have to be written."""
    return any(isinstance(value, list | dict) and value for value in values)


def _of_type(values: list[Any], kind: type) -> dict[str, Any]:
    """Return the schema of those of ``values`` that are of exactly this type."""
    if kind in _EMPTY:
        return dict(_EMPTY[kind])
    if kind is type(None):
        return {"type": "null"}
    of_type = [value for value in values if type(value) is kind]
    name = {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]
    if kind is bool:
        return {"type": name} if len(of_type) == 2 else {"type": name, "const": of_type[0]}
    return {"type": name, "enum": of_type}
