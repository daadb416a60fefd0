"""Messages of MindIE's chats: OpenAI's, with additional rules, and with images, videos and sounds as parts.

A medium is given by a local path, a URL or in base64.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...interface.errors import InvalidField
from ...interface.readers import any_of, reader, string
from ...interface.request import MAX_MESSAGES, MediaPart, Message, TextPart
from ..fields.fields import unknown_field
from ..fields.image_parts import MAX_IMAGE, Forms, Kind, MediaLimit, Place, data_of, part_of, place_of
from ..fields.messages import TEXT_PARTS, PartReaders, read_message, read_messages

_FORMS = Forms(data=True, paths=True)


class Medium(NamedTuple):
    """A kind of media. ``types`` has file extensions, each with the subtypes of its media type."""

    kind: Kind
    max_bytes: int  # bytes
    types: Mapping[str, tuple[str, ...]]

    @property
    def allowed(self) -> str:
        return ", ".join(self.types)


MEDIA: Mapping[str, Medium] = {
    "image_url": Medium("image", MAX_IMAGE, {"jpg": ("jpeg", "jpg"), "jpeg": ("jpeg", "jpg"), "png": ("png",)}),
    "video_url": Medium(
        "video", 512 * 2**20, {"mp4": ("mp4",), "avi": ("x-msvideo", "avi"), "wmv": ("x-ms-wmv", "wmv")}
    ),
    "audio_url": Medium(
        "audio", 20 * 2**20, {"mp3": ("mpeg", "mp3"), "wav": ("wav", "x-wav"), "flac": ("flac", "x-flac")}
    ),
}


def media_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a part of type ``name``."""
    text = {"type": "string", "minLength": 1}
    url = {"type": "object", "required": ["url"], "properties": {"url": text}, "additionalProperties": False}
    return {
        "type": "object",
        "required": ["type", name],
        "properties": {"type": {"const": name}, name: any_of(text, url)},
        "additionalProperties": False,
    }


def media_part(value: dict[str, Any], path: str) -> MediaPart:
    """Read a part whose ``type`` is one of ``MEDIA``.

    Raises ``InvalidField`` for what can be checked without opening a file: the form, the type, and in base64 the size.
    """
    name = value["type"]
    medium = MEDIA[name]
    for key in value:
        if key not in ("type", name):
            raise unknown_field(key, value[key], ("type", name), f"{path}.")
    given, where = value.get(name), f"{path}.{name}"
    if isinstance(given, dict):
        for key in given:
            if key != "url":
                raise unknown_field(key, given[key], ("url",), f"{where}.")
        given, where = given.get("url"), f"{where}.url"
    if not isinstance(given, str) or not given:
        raise InvalidField(where, given, 'a local path, an http or https URL or base64, alone or as {"url": …}')
    if given.startswith("data:"):
        types = [f"{medium.kind}/{kind}" for kinds in medium.types.values() for kind in kinds]
        place = data_of(given, where, list(dict.fromkeys(types)), medium.max_bytes)
    else:
        place = place_of(given, where, _FORMS)
        _check_type(place, where, given, medium)
    return part_of(place, medium.kind, medium.max_bytes, where, path, name)


def _check_type(place: Place, where: str, given: str, medium: Medium) -> None:
    """Raise ``InvalidField`` for another extension, and for a file without one."""
    extension = posixpath.splitext(place.file)[1].removeprefix(".").lower()
    if extension not in medium.types and (extension or place.source == "path"):
        raise InvalidField(where, given, f"a file of type {medium.allowed}")


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
    """Read a list of messages with at most ``MAX_CONTENT`` characters and ``image_parts.MAX_MEDIA`` media."""
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
