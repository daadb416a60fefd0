"""Images in messages: their forms, which are checked without opening, fetching or decoding anything.

Whether a path or URL may be read, and whether the model reads images, is checked in ``tasks.media``.
"""

from __future__ import annotations

import re
import string as characters
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from ...interface.errors import InvalidField
from ...interface.readers import Entry, Reader, one_of, reader, record, string, type_of
from ...interface.request import MediaPart

Kind: TypeAlias = Literal["image", "video", "audio"]
MAX_MEDIA = 20  # of one request
MAX_IMAGE = 20 * 2**20  # bytes of one image
MAX_URL = 4096  # characters of a path or URL
TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
ONLY_OF_USERS = "only messages of the user have images"
NO_FILES = "this server keeps no files"
_DATA = re.compile(r"data:([a-z]+/[A-Za-z0-9.+-]{1,40});base64,", re.ASCII)
_ALPHABET = (characters.ascii_letters + characters.digits + "+/").encode()


class MediaLimit:
    """A check that refuses a request with more than ``MAX_MEDIA`` parts of ``types``.

    Messages are counted once, when the first one with a list of parts is read: texts cost nothing.
    """

    __slots__ = ("_messages", "_path", "_types", "_what")

    def __init__(self, messages: Sequence[Any], path: str, types: Collection[str], what: str = "images") -> None:
        self._messages, self._path, self._types, self._what = messages, path, types, what

    def check(self) -> None:
        """Raise ``InvalidField`` for too many, before any of them is read."""
        messages, self._messages = self._messages, ()
        number = 0
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, str) and isinstance(content, list | tuple):
                number += self._number(content)
        if number > MAX_MEDIA:
            raise InvalidField(self._path, f"{number} {self._what}", f"at most {MAX_MEDIA} in a request")

    def _number(self, parts: Sequence[Any]) -> int:
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        return sum(isinstance(kind, str) and kind in self._types for kind in kinds)


class Place(NamedTuple):
    """The resource a text refers to. ``file`` is the path of a file, or that within a URL."""

    source: Literal["path", "url", "data"]
    place: str
    content: str
    file: str


class Forms(NamedTuple):
    """The forms of an image allowed besides an http or https URL: a ``data:`` URL, or a path, also as ``file://``."""

    data: bool
    paths: bool

    @property
    def allowed(self) -> str:
        first = "an absolute path, an http or https URL" if self.paths else "an http or https URL"
        return first + (", or data:…;base64,…" if self.data else "")

    @property
    def schema(self) -> dict[str, Any]:
        types = f"; types of data: {', '.join(TYPES)}" if self.data else ""
        return {"type": "string", "minLength": 1, "description": self.allowed + types}


def place_of(given: str, where: str, forms: Forms) -> Place:
    """Return what an http or https URL or, if ``forms`` has them, a path refers to.

    Raises ``InvalidField`` for anything else.
    """
    if len(given) > MAX_URL:
        raise InvalidField(where, f"{len(given)} characters", f"{forms.allowed}; at most {MAX_URL} unless it is data")
    string(given, where)
    try:
        url = urlsplit(given)
        host, port = url.hostname, url.port
    except ValueError:
        raise InvalidField(where, given, forms.allowed) from None
    if url.scheme in ("http", "https"):
        if not host or "@" in url.netloc:
            raise InvalidField(where, given, "a URL with a host, without a user's name")
        return Place("url", host if port is None else f"{host}:{port}", given, url.path)
    local = unquote(url.path) if url.scheme == "file" and not url.netloc else given
    if not forms.paths or not local.startswith("/") or "\0" in local:
        raise InvalidField(where, given, forms.allowed)
    return Place("path", local, local, local)


def data_of(given: str, where: str, types: Sequence[str], max_bytes: int) -> Place:
    """Return the base64 text of a ``data:`` URL of one of ``types``, as the content of a place.

    Raises ``InvalidField`` for another type, for invalid base64, and unless it has 1 to ``max_bytes`` bytes.
    """
    head = _DATA.match(given)
    if head is None or head[1].lower() not in types:
        raise InvalidField(where, given[:64], "data:TYPE;base64,… of type " + ", ".join(types))
    return Place("data", "", base64_of(given[head.end() :], where, max_bytes, "valid base64 after the comma"), "")


def base64_of(text: str, where: str, max_bytes: int, allowed: str = "valid base64") -> str:
    """Return ``text`` if it is base64 of 1 to ``max_bytes`` bytes. Raises ``InvalidField``.

    Nothing is decoded: a request may have many megabytes, which are decoded later or not at all.
    """
    padding = text.encode().translate(None, _ALPHABET) if text.isascii() else None
    if len(text) % 4 or padding not in (b"", b"=", b"==") or not text.endswith(padding.decode()):
        raise InvalidField(where, f"{len(text)} characters that are not base64", allowed)
    size = len(text) // 4 * 3 - len(padding)
    if not 0 < size <= max_bytes:
        raise InvalidField(where, f"{size} bytes", f"1 to {max_bytes} bytes")
    return text


def part_of(place: Place, kind: Kind, max_bytes: int, field: str, part: str, name: str) -> MediaPart:
    """Return what is at ``place``. ``field`` is the path of the field that names it, ``part`` that of its part."""
    return MediaPart(
        kind=kind,
        source=place.source,
        place=place.place,
        content=place.content,
        max_bytes=max_bytes,
        field=field,
        part=part,
        name=name,
    )


def data_image(text: str, field: str, part: str, name: str) -> MediaPart:
    """Return the image whose data in base64 is ``text``. Raises ``InvalidField``."""
    place = Place("data", "", base64_of(text, field, MAX_IMAGE), "")
    return part_of(place, "image", MAX_IMAGE, field, part, name)


def url_image(given: str, field: str, part: str, name: str, forms: Forms) -> MediaPart:
    """Return the image that ``given``, which must have one of ``forms``, is or refers to. Raises ``InvalidField``."""
    is_data = forms.data and given.startswith("data:")
    place = data_of(given, field, TYPES, MAX_IMAGE) if is_data else place_of(given, field, forms)
    return part_of(place, "image", MAX_IMAGE, field, part, name)


def url_reader(forms: Forms) -> Reader[str]:
    """Return a reader of a text that is not empty; ``url_image`` checks its form, once the paths are known."""

    @reader(**forms.schema)
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or not value:
            raise InvalidField(path, value, forms.allowed)
        return value

    return read


# A hint of how closely to look. OpenAI's models scale an image by it; here the model's own processor, which has no such
# choice, scales every image alike, and no closer look is left out.
DETAIL = Entry(one_of("auto", "low", "high"))
_FORMS = Forms(data=True, paths=True)
_URL = record(url=Entry(url_reader(_FORMS), required=_FORMS.allowed), detail=DETAIL)
_OBJECT = 'an object {"url": …}, not the URL itself'


@reader(**_URL.schema)
def _url_object(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, str):
        raise InvalidField(path, value[:64], _OBJECT)
    return _URL(value, path)


_IMAGE = record(type=type_of("image_url"), image_url=Entry(_url_object, required='an object: {"url": …}'))


@reader(**_IMAGE.schema)
def image_url(value: Any, path: str) -> MediaPart:
    """Read OpenAI's part of an image, which may also be a path, as in vLLM."""
    given = _IMAGE(value, path)["image_url"]["url"]
    return url_image(given, f"{path}.image_url.url", path, "image_url", _FORMS)
