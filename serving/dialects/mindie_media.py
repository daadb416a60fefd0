"""Media parts of MindIE's messages: images, videos and sounds, given by a local path, a URL or in base64."""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import InvalidField
from ..readers import any_of, string
from ..request import MediaPart
from .fields import unknown_field

MAX_MEDIA = 20  # of one request
MAX_URL = 4096  # characters of a path or URL
_DATA = re.compile(r"data:([a-z]+)/([A-Za-z0-9.+-]{1,40});base64,", re.ASCII)


class Medium(NamedTuple):
    """A kind of media. ``types`` has file extensions, each with the subtypes of its media type."""

    kind: Literal["image", "video", "audio"]
    most: int  # bytes
    types: Mapping[str, tuple[str, ...]]

    @property
    def allowed(self) -> str:
        return ", ".join(self.types)


MEDIA: Mapping[str, Medium] = {
    "image_url": Medium("image", 20 * 2**20, {"jpg": ("jpeg", "jpg"), "jpeg": ("jpeg", "jpg"), "png": ("png",)}),
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
        return _embedded(given, where, path, medium)
    if len(given) > MAX_URL:
        raise InvalidField(where, f"{len(given)} characters", f"a path or URL of at most {MAX_URL}, or data:…;base64,…")
    return _named(string(given, where), where, path, medium)


def _embedded(given: str, where: str, path: str, medium: Medium) -> MediaPart:
    head = _DATA.match(given)
    types = [f"{medium.kind}/{kind}" for kinds in medium.types.values() for kind in kinds]
    if head is None or f"{head[1]}/{head[2]}".lower() not in types:
        raise InvalidField(where, given[:64], "data:TYPE;base64,… of type " + ", ".join(dict.fromkeys(types)))
    text = given[head.end() :]
    if len(text) // 4 * 3 > medium.most + 3:
        raise _too_large(where, len(text) // 4 * 3, medium.most)
    try:
        size = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise InvalidField(where, "a text", "valid base64 after the comma") from None
    if not 0 < size <= medium.most:
        raise _too_large(where, size, medium.most)
    return MediaPart(kind=medium.kind, source="data", most=medium.most, field=where, part=path)


def _named(given: str, where: str, path: str, medium: Medium) -> MediaPart:
    try:
        url = urlsplit(given)
        host, port = url.hostname, url.port
    except ValueError:
        raise InvalidField(where, given, "a local path or a valid http or https URL") from None
    if url.scheme in ("http", "https"):
        if not host or "@" in url.netloc:
            raise InvalidField(where, given, "a URL with a host, without a user's name")
        _check_type(url.path, where, given, medium, needed=False)
        address = host if port is None else f"{host}:{port}"
        return MediaPart(kind=medium.kind, source="url", place=address, most=medium.most, field=where, part=path)
    local = unquote(url.path) if url.scheme == "file" and not url.netloc else given
    if not local.startswith("/") or "\0" in local:
        raise InvalidField(where, given, "an absolute path, an http or https URL, or data:…;base64,…")
    _check_type(local, where, given, medium, needed=True)
    return MediaPart(kind=medium.kind, source="path", place=local, most=medium.most, field=where, part=path)


def _check_type(place: str, where: str, given: str, medium: Medium, *, needed: bool) -> None:
    extension = posixpath.splitext(place)[1].removeprefix(".").lower()
    if extension not in medium.types and (extension or needed):
        raise InvalidField(where, given, f"a file of type {medium.allowed}")


def _too_large(where: str, size: int, most: int) -> InvalidField:
    return InvalidField(where, f"{size} bytes", f"1 to {most} bytes")
