"""Enumerations as generators of clients understand them: those of one type, of which they make a class each.

Fields that accept only what asks for nothing, such as null, false and [], have enumerations of several types.
Generators also need the type of each value, and the schema of what is in an array.
"""

from __future__ import annotations

from typing import Any

_EMPTY = {list: {"type": "array", "maxItems": 0, "items": {}}, dict: {"type": "object", "maxProperties": 0}}
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
            found[key] = {name: _member(plain_enums(entry)) for name, entry in value.items()}
        else:
            found[key] = value if key in _LITERAL else plain_enums(value)
    if found.get("type") == "array" and not {"items", "prefixItems"} & found.keys():
        found["items"] = {}  # which generators require
    if isinstance(found.get("const"), bool):
        return _rest(found) | _boolean(found["const"])
    if isinstance(found.get("const"), list | dict):
        return _rest(found) | plain_enums({"enum": [found["const"]]})
    values = found.get("enum")
    if not isinstance(values, list):
        return found
    if all(isinstance(value, str) for value in values):
        return found | {"type": "string"}
    filled = [value for value in values if isinstance(value, list | dict) and value]
    options = [_of_type(values, kind) for kind in dict.fromkeys(type(value) for value in values if value not in filled)]
    options += [_filled(value) for value in filled]
    return _rest(found) | (options[0] if len(options) == 1 else {"anyOf": options})


def _member(schema: Any) -> Any:
    """Return the schema of a named member. openapi-generator makes no Python of one that is of type ``null`` alone; it
    understands an enumeration."""
    if isinstance(schema, dict) and schema.get("type") == "null":
        return _rest(schema) | {"enum": [None]}
    return schema


def _rest(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema says besides its values."""
    return {key: value for key, value in schema.items() if key not in ("enum", "const", "type")}


def _filled(value: Any) -> dict[str, Any]:
    """Return the schema of exactly this value, a list or an object that is not empty."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "required": list(value),
            "properties": {name: _member(plain_enums({"enum": [one]})) for name, one in value.items()},
            "additionalProperties": False,
        }
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return {
            "type": "array",
            "minItems": len(value),
            "maxItems": len(value),
            "items": plain_enums({"enum": value[:1]}),
        }
    return {"enum": [value]}


def _boolean(value: bool) -> dict[str, Any]:
    """Return the schema of one truth value. Generators make code of ``const`` that does not compile; they pass over
    ``not``."""
    return {"type": "boolean", "not": {"const": not value}}


def _of_type(values: list[Any], kind: type) -> dict[str, Any]:
    """Return the schema of those of ``values`` that are of exactly this type."""
    if kind in _EMPTY:
        return dict(_EMPTY[kind])
    if kind is type(None):
        return {"type": "null"}
    of_type = [value for value in values if type(value) is kind]
    name = {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]
    if kind is bool:
        return {"type": name} if len(of_type) == 2 else _boolean(bool(of_type[0]))
    return {"type": name, "enum": of_type}
