"""The JSON types of tools' arguments: needed because formats with parameters write strings and numbers alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..interface.request import Tool
from ..interface.tool_format import CUSTOM_INPUT

MAX_DEPTH = 8  # of nested unions and references


def argument_types(tools: Iterable[Tool]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the JSON types that each argument may have, by the names of tool and argument.

    An argument whose schema leaves the types open has no entry.
    """
    return {tool.name: _of_tool(tool) for tool in tools}


def _of_tool(tool: Tool) -> dict[str, tuple[str, ...]]:
    if tool.kind == "custom":
        return {CUSTOM_INPUT: ("string",)}  # so that even an input like 12 stays a string
    root = tool.parameters or {}
    properties = root.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    found = {name: tuple(dict.fromkeys(_types(schema, root, MAX_DEPTH))) for name, schema in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> list[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared] + (["null"] if schema.get("nullable") is True else [])
    if isinstance(declared, list):
        return [each for each in declared if isinstance(each, str)]
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_at(reference, root), root, depth - 1)
    if "const" in schema:
        return [_type_of(schema["const"])]
    if isinstance(values := schema.get("enum"), list):
        return [_type_of(value) for value in values]
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(union), list):
            parts = [_types(branch, root, depth - 1) for branch in branches]
            if union == "allOf":
                return next((part for part in parts if part), [])
            return [each for part in parts for each in part] if all(parts) else []
    return []


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a JSON pointer within the same schema; None for any other reference."""
    found: Any = root
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "string")
