"""Media parts of MindIE's messages: images, videos and sounds, given by a local path, a URL or in base64."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...interface.errors import InvalidField
from ...interface.readers import any_of
from ...interface.request import MediaPart
from ..fields.fields import unknown_field
from ..fields.image_parts import MAX_PICTURE, Forms, Kind, Place, data_of, part_of, place_of

_FORMS = Forms(data=True, paths=True)


class Medium(NamedTuple):
    """A kind of media. ``types`` has file extensions, each with the subtypes of its media type."""

    kind: Kind
    most: int  # bytes
    types: Mapping[str, tuple[str, ...]]

    @property
    def allowed(self) -> str:
        return ", ".join(self.types)


MEDIA: Mapping[str, Medium] = {
    "image_url": Medium("image", MAX_PICTURE, {"jpg": ("jpeg", "jpg"), "jpeg": ("jpeg", "jpg"), "png": ("png",)}),
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
        place = data_of(given, where, list(dict.fromkeys(types)), medium.most)
    else:
        place = place_of(given, where, _FORMS)
        _check_type(place, where, given, medium)
    return part_of(place, medium.kind, medium.most, where, path, name)


def _check_type(place: Place, where: str, given: str, medium: Medium) -> None:
    """Raise ``InvalidField`` for another extension, and for a file without one."""
    extension = posixpath.splitext(place.file)[1].removeprefix(".").lower()
    if extension not in medium.types and (extension or place.source == "path"):
        raise InvalidField(where, given, f"a file of type {medium.allowed}")
