"""Messages of MindIE's chats: OpenAI's, with additional rules and parts."""

from __future__ import annotations

from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import any_of, reader, string
from ...interface.request import MAX_MESSAGES, Message, TextPart
from ..fields.image_parts import MediaLimit
from ..fields.messages import TEXT_PARTS, PartReaders, read_message, read_messages
from .media import MEDIA, media_part, media_schema

MAX_CONTENT = 4 * 2**20  # characters of all messages together
ROLES = ("system", "user", "assistant", "tool")
_PARTS: PartReaders = {**TEXT_PARTS, **dict.fromkeys(MEDIA, media_part)}
_TEXT = {"type": "string", "minLength": 1}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "additionalProperties": False,
}
_CONTENT = any_of(
    _TEXT,
    {"type": "array", "items": any_of(_TEXT_PART, *map(media_schema, MEDIA)), "minItems": 1},
)


def _schema() -> dict[str, Any]:
    """Return OpenAI's schema, in which ``content`` must not be empty unless there are tool calls."""
    kinds = []
    for kind in read_messages.schema["items"]["anyOf"]:
        properties = dict(kind["properties"])
        roles = [role for role in properties["role"]["enum"] if role in ROLES]
        properties["role"] = {"enum": roles}
        properties["content"] = _CONTENT if "content" in kind["required"] else any_of(_CONTENT, {"enum": [None, ""]})
        if "tool" not in roles:
            properties["tool_call_id"] = {"type": ["string", "null"]}
        if kind["required"] != ["role", "tool_calls"]:
            kinds.append({**kind, "properties": properties})
            continue
        calls = properties["tool_calls"]
        properties["tool_calls"] = {**calls, "items": calls["items"]["anyOf"][0]}
        kinds.append({**kind, "properties": properties})
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": MAX_MESSAGES}


@reader(**_schema())
def messages(value: Any, path: str) -> tuple[Message, ...]:
    """Read a list of messages with at most ``MAX_CONTENT`` characters and ``picture_parts.MAX_MEDIA`` media."""
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidField(path, f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    limit = MediaLimit(value, path, MEDIA, "images, videos and sounds")
    found = tuple(_message(entry, f"{path}[{i}]", limit) for i, entry in enumerate(value))
    if (size := sum(map(_size, found))) > MAX_CONTENT:
        raise InvalidField(path, f"{size} characters", f"at most {MAX_CONTENT} in all messages together")
    return found


def _message(value: Any, path: str, limit: MediaLimit) -> Message:
    if isinstance(value, dict):
        _check_role(value, path)
        value = _without_other_ids(value, path)
    message = read_message(value, path, limit, _PARTS)
    for i, call in enumerate(value.get("tool_calls") or ()):
        if call.get("type") != "function":
            raise InvalidField(f"{path}.tool_calls[{i}].type", call.get("type"), '"function"')
    if not message.tool_calls and not message.content:
        raise InvalidField(f"{path}.content", "", "a text that is not empty, or tool_calls of an assistant beside it")
    if not isinstance(message.content, str):
        for i, part in enumerate(message.content):
            if isinstance(part, TextPart) and not part.text:
                raise InvalidField(f"{path}.content[{i}].text", "", "a text that is not empty")
    return message


def _check_role(value: dict[str, Any], path: str) -> None:
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role", role, "one of " + ", ".join(ROLES))


def _without_other_ids(value: dict[str, Any], path: str) -> dict[str, Any]:
    """Clear ``tool_call_id`` unless the role is tool: any message may have it, but only a tool's uses it."""
    given = value.get("tool_call_id")
    if value["role"] == "tool" or given is None:
        return value
    string(given, f"{path}.tool_call_id")
    return {**value, "tool_call_id": None}


def _size(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text) for part in message.content if isinstance(part, TextPart))
