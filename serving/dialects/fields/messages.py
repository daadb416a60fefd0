"""Chat messages: their JSON schema, and reading them into ``request.Message``. Content parts are not joined."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...interface.errors import InvalidField
from ...interface.readers import obj, reader, string
from ...interface.request import MAX_MESSAGES, Message, Part, Role, TextPart, ToolCall
from ...interface.tool_format import CUSTOM_INPUT
from .fields import unknown_field
from .image_parts import ONLY_OF_USERS, MediaLimit, image_url

PartReaders: TypeAlias = Mapping[str, Callable[[dict[str, Any], str], Part]]

# OpenAI's "developer" is its newer word for "system"; templates know only the latter.
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Keys that clients copy back from this server's replies; only null or an empty list is accepted.
EMPTY_ONLY = ("refusal", "audio", "function_call", "annotations")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", *EMPTY_ONLY)
IMAGES = frozenset({"image_url"})
_KNOWN, _EMPTY_ONLY = frozenset(KEYS), frozenset(EMPTY_ONLY)

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
_USER_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_PART, image_url.schema]}, "minItems": 1}]}

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
_CUSTOM_CALL = {
    "type": "object",
    "required": ["id", "type", "custom"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "required": ["name", "input"],
            "properties": {"name": _TEXT, "input": _TEXT},
            "additionalProperties": False,
        },
        "index": {},
    },
    "additionalProperties": False,
}
_CALLS = {"type": "array", "items": {"anyOf": [_CALL, _CUSTOM_CALL]}}


def _messages_schema() -> dict[str, Any]:
    """Return the schema of a list of messages; ``content`` may be missing only if there are tool calls."""
    common = {"name": _TEXT_OR_NULL, "reasoning_content": _TEXT_OR_NULL} | dict.fromkeys(EMPTY_ONLY, _NOTHING)
    plain = common | {"content": _CONTENT, "tool_calls": _NOTHING, "tool_call_id": _NO_ID}
    calling = common | {"content": {"anyOf": [_CONTENT, {"type": "null"}]}, "tool_call_id": _NO_ID}
    kinds = [
        _message_schema(("system", "developer"), plain, "content"),
        _message_schema(("user",), plain | {"content": _USER_CONTENT}, "content"),
        _message_schema(("assistant",), plain | {"tool_calls": {"anyOf": [_CALLS, {"type": "null"}]}}, "content"),
        _message_schema(("assistant",), calling | {"tool_calls": _CALLS | {"minItems": 1}}, "tool_calls"),
        _message_schema(("tool",), plain | {"tool_call_id": _TEXT | {"minLength": 1}}, "content", "tool_call_id"),
    ]
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message_schema(roles: tuple[str, ...], properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "properties": {"role": {"enum": list(roles)}, **properties},
        "additionalProperties": False,
    }


@reader(**_messages_schema())
def read_messages(value: Any, path: str) -> tuple[Message, ...]:
    """Read a non-empty list of messages.

    The schema cannot express that arguments in a string must be JSON, nor which URLs and data images may have.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidField(path, f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    limit = MediaLimit(value, path, IMAGES)
    return tuple(read_message(entry, f"{path}[{i}]", limit) for i, entry in enumerate(value))


def read_message(value: Any, path: str, limit: MediaLimit, parts: PartReaders | None = None) -> Message:
    """Read one message of those that ``limit`` counts.

    ``parts`` are the kinds of parts that its content may have, by default ``PARTS`` in a user's message and
    ``TEXT_PARTS`` in others.
    """
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with role and content")
    for key in value:
        if key not in _KNOWN:
            raise unknown_field(key, value[key], KEYS, f"{path}.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role", role, "one of " + ", ".join(ROLES))
    for key in () if _EMPTY_ONLY.isdisjoint(value) else EMPTY_ONLY:
        if value.get(key) not in (None, [], ()):
            raise InvalidField(f"{path}.{key}", value[key], "null")
    calls = _tool_calls(value.get("tool_calls"), role, path)
    content: str | tuple[Part, ...] = ""
    if value.get("content") is not None:
        content = value["content"]
        if isinstance(content, str):
            content = string(content, f"{path}.content")
        else:
            limit.check()
            content = _parts(content, f"{path}.content", parts or (PARTS if role == "user" else TEXT_PARTS))
    elif not calls:
        raise InvalidField(f"{path}.content", None, "a string or a list of parts")
    thought = value.get("reasoning_content")
    return Message(
        role=ROLES[role],
        content=content,
        name=None if (name := value.get("name")) is None else string(name, f"{path}.name"),
        reasoning_content=None if thought is None else string(thought, f"{path}.reasoning_content"),
        tool_calls=calls,
        tool_call_id=_tool_call_id(value.get("tool_call_id"), role, path),
    )


def _parts(value: Any, path: str, parts: PartReaders) -> tuple[Part, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a string or a non-empty list of parts")
    return tuple(_part(entry, f"{path}[{i}]", parts) for i, entry in enumerate(value))


def _part(value: Any, path: str, parts: PartReaders) -> Part:
    if not isinstance(value, dict):
        raise InvalidField(path, value, 'a part such as {"type": "text", "text": "..."}')
    kind = value.get("type")
    read = parts.get(kind) if isinstance(kind, str) else None
    if read is None:
        kinds = ", ".join(f'"{name}"' for name in parts)
        why = f": {ONLY_OF_USERS}" if isinstance(kind, str) and kind in IMAGES else ""
        raise InvalidField(f"{path}.type", kind, (kinds if len(parts) == 1 else f"one of {kinds}") + why)
    return read(value, path)


def text_part(value: dict[str, Any], path: str) -> TextPart:
    for key in value:
        if key not in ("type", "text"):
            raise unknown_field(key, value[key], ("type", "text"), f"{path}.")
    return TextPart(string(value.get("text"), f"{path}.text"))


# Readers by "type". Any other kind is refused, with the path of the part. A new kind needs its schema in ``_CONTENT``
# or ``_USER_CONTENT``.
TEXT_PARTS: PartReaders = {"text": text_part}
PARTS: PartReaders = {**TEXT_PARTS, "image_url": image_url}


def _tool_call_id(value: Any, role: str, path: str) -> str | None:
    if role == "tool":
        if not isinstance(value, str) or not value:
            raise InvalidField(f"{path}.tool_call_id", value, "the id of the tool call that this message answers")
        return string(value, f"{path}.tool_call_id")
    if value not in (None, ""):
        raise InvalidField(f"{path}.tool_call_id", value, "null: only a message of role tool has one")
    return None


def _tool_calls(value: Any, role: str, path: str) -> tuple[ToolCall, ...]:
    where = f"{path}.tool_calls"
    if value is None or value == []:
        return ()
    if role != "assistant":
        raise InvalidField(where, value, "null: only a message of role assistant has tool calls")
    if not isinstance(value, list | tuple):
        raise InvalidField(where, value, "a list of tool calls")
    return tuple(_tool_call(entry, f"{where}[{i}]") for i, entry in enumerate(value))


_CALL_FIELDS = {"function": ("name", "arguments"), "custom": ("name", "input")}


def _tool_call(value: Any, path: str) -> ToolCall:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with id, type and function")
    kind = value.get("type", "function")
    if not isinstance(kind, str) or kind not in _CALL_FIELDS:
        raise InvalidField(f"{path}.type", kind, "one of " + ", ".join(_CALL_FIELDS))
    for key in value:
        if key not in ("id", "type", kind, "index"):
            raise unknown_field(key, value[key], ("id", "type", kind), f"{path}.")
    called, second = value.get(kind), _CALL_FIELDS[kind][1]
    if not isinstance(called, dict):
        raise InvalidField(f"{path}.{kind}", called, f"an object with name and {second}")
    for key in called:
        if key not in _CALL_FIELDS[kind]:
            raise unknown_field(key, called[key], _CALL_FIELDS[kind], f"{path}.{kind}.")
    where = f"{path}.{kind}.{second}"
    given = called.get(second)
    return ToolCall(
        id=string(value.get("id"), f"{path}.id"),
        name=string(called.get("name"), f"{path}.{kind}.name"),
        arguments=call_arguments(given, where) if kind == "function" else {CUSTOM_INPUT: string(given, where)},
    )


def call_arguments(value: Any, path: str) -> Any:
    """Read the arguments' JSON text into the object that templates print; the document's dict is accepted too."""
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
