"""Chat messages: their shape on the wire, read into the plain dicts that a chat template takes."""

from __future__ import annotations

import json
from typing import Any

from ..errors import InvalidField
from ..readers import obj, reader, string
from ..request import MAX_MESSAGES
from .fields import unknown_field
from .message_schema import messages_schema

ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that clients copy back from our own replies; only null (or an empty list) says nothing.
EMPTY_ONLY = ("refusal", "audio", "function_call", "annotations")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", *EMPTY_ONLY)


@reader(**messages_schema(EMPTY_ONLY))
def read_messages(value: Any, path: str) -> tuple[dict[str, Any], ...]:
    """A non-empty list of messages. Text parts of one content are joined as they stand: nothing is put between."""
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidField(path, f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    return tuple(_message(entry, f"{path}[{i}]") for i, entry in enumerate(value))


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with role and content")
    for key in value:
        if key not in KEYS:
            raise unknown_field(key, value[key], KEYS, f"{path}.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role", role, "one of " + ", ".join(ROLES))
    for key in EMPTY_ONLY:
        if value.get(key) not in (None, [], ()):
            raise InvalidField(f"{path}.{key}", value[key], "null")
    # OpenAI's "developer" is its newer word for "system"; templates know only the latter
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = _tool_calls(value.get("tool_calls"), role, path)
    if value.get("content") is not None:
        message["content"] = _content(value["content"], f"{path}.content")
    elif not calls:
        raise InvalidField(f"{path}.content", None, "a string or a list of text parts")
    else:
        message["content"] = ""
    for key in ("name", "reasoning_content"):
        if value.get(key) is not None:
            message[key] = string(value[key], f"{path}.{key}")
    if calls:
        message["tool_calls"] = calls
    _tool_call_id(value, role, path, message)
    return message


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return string(value, path)
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a string or a non-empty list of text parts")
    return "".join(_part(entry, f"{path}[{i}]") for i, entry in enumerate(value))


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise InvalidField(path, value, 'a part such as {"type": "text", "text": "..."}')
    kind = value.get("type")
    if kind != "text":
        raise InvalidField(f"{path}.type", kind, '"text": this model reads text only')
    for key in value:
        if key not in ("type", "text"):
            raise unknown_field(key, value[key], ("type", "text"), f"{path}.")
    return string(value.get("text"), f"{path}.text")


def _tool_call_id(value: dict[str, Any], role: str, path: str, message: dict[str, Any]) -> None:
    call_id = value.get("tool_call_id")
    if role == "tool":
        if not isinstance(call_id, str) or not call_id:
            raise InvalidField(f"{path}.tool_call_id", call_id, "the id of the tool call that this message answers")
        message["tool_call_id"] = string(call_id, f"{path}.tool_call_id")
    elif call_id not in (None, ""):
        raise InvalidField(f"{path}.tool_call_id", call_id, "null: only a message of role tool has one")


def _tool_calls(value: Any, role: str, path: str) -> list[dict[str, Any]]:
    where = f"{path}.tool_calls"
    if value is None or value == []:
        return []
    if role != "assistant":
        raise InvalidField(where, value, "null: only a message of role assistant has tool calls")
    if not isinstance(value, list | tuple):
        raise InvalidField(where, value, "a list of tool calls")
    return [_tool_call(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def _tool_call(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with id, type and function")
    for key in value:
        if key not in ("id", "type", "function", "index"):
            raise unknown_field(key, value[key], ("id", "type", "function"), f"{path}.")
    if value.get("type", "function") != "function":
        raise InvalidField(f"{path}.type", value["type"], '"function"')
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidField(f"{path}.function", function, "an object with name and arguments")
    for key in function:
        if key not in ("name", "arguments"):
            raise unknown_field(key, function[key], ("name", "arguments"), f"{path}.function.")
    return {
        "id": string(value.get("id"), f"{path}.id"),
        "type": "function",
        "function": {
            "name": string(function.get("name"), f"{path}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


def _arguments(value: Any, path: str) -> Any:
    """The arguments' JSON text as the object that templates print; the document's dict is taken as well."""
    if isinstance(value, dict):
        return obj(value, path)
    text = string(value, path)
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise InvalidField(path, value, "a JSON object in a string") from None
    if not isinstance(found, dict):
        raise InvalidField(path, value, "a JSON object in a string")
    return obj(found, path)
