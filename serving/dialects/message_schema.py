"""The JSON schema of ``messages``: what ``read_messages`` takes. That arguments in a string are JSON, it cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..request import MAX_MESSAGES

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_NOTHING: dict[str, Any] = {"enum": [None, []]}
_NO_ID = {"enum": [None, ""]}

_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}

_FUNCTION = {
    "type": "object",
    "required": ["name", "arguments"],
    "properties": {
        "name": _TEXT,
        "arguments": {"anyOf": [{"type": "string", "contentMediaType": "application/json"}, {"type": "object"}]},
    },
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {"id": _TEXT, "type": {"const": "function"}, "function": _FUNCTION, "index": {}},
    "additionalProperties": False,
}
_CALLS = {"type": "array", "items": _CALL}


def messages_schema(empty_only: tuple[str, ...]) -> dict[str, Any]:
    """``empty_only`` are keys that only say nothing. ``content`` may be missing only beside tool calls."""
    common = {"name": _TEXT_OR_NULL, "reasoning_content": _TEXT_OR_NULL} | dict.fromkeys(empty_only, _NOTHING)
    plain = common | {"content": _CONTENT, "tool_calls": _NOTHING, "tool_call_id": _NO_ID}
    calling = common | {"content": {"anyOf": [_CONTENT, {"type": "null"}]}, "tool_call_id": _NO_ID}
    kinds = [
        _message(("system", "developer", "user"), plain, "content"),
        _message(("assistant",), plain | {"tool_calls": {"anyOf": [_CALLS, {"type": "null"}]}}, "content"),
        _message(("assistant",), calling | {"tool_calls": _CALLS | {"minItems": 1}}, "tool_calls"),
        _message(("tool",), plain | {"tool_call_id": _TEXT | {"minLength": 1}}, "content", "tool_call_id"),
    ]
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(roles: tuple[str, ...], properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "properties": {"role": {"enum": list(roles)}, **properties},
        "additionalProperties": False,
    }
