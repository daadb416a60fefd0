"""Images that callers in Python have as objects: the bytes of a file, or an image of Pillow."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

from ....serving.interface.errors import InvalidField

BEGINNINGS = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
)

IMAGE_COLUMNS = ("image", "images")  # of a frame: no request fields, but images of the row's request
_IMAGES = "the bytes of a PNG, JPEG, WebP or GIF file, an image of Pillow, a URL, or a list of these"
_BESIDE = "a column of images beside messages or prompt"


def with_images(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a frame, of JSON types, with the images of its image columns in its last message of a user,
    before the text. A prompt becomes such a message. Raises ``InvalidField``.
    """
    urls = [url for name in IMAGE_COLUMNS if name in row for url in _urls(name, row[name])]
    found = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    if not urls:
        return found
    name = next(name for name in IMAGE_COLUMNS if name in row)
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    if "messages" not in found:
        if not isinstance(found.get("prompt"), str):
            raise InvalidField(name, f"{len(urls)} images", f"{_BESIDE}, which is one text")
        return {"messages": [{"role": "user", "content": [*parts, _text(found.pop("prompt"))]}], **found}
    messages = found["messages"]
    turns = messages if isinstance(messages, list) else []
    last = next((i for i in reversed(range(len(turns))) if _is_user(turns[i])), None)
    if last is None:
        raise InvalidField(name, f"{len(urls)} images", f"{_BESIDE}, which has a message of a user")
    content = turns[last].get("content")
    written = [_text(content)] if isinstance(content, str) else content
    if not isinstance(written, list):
        raise InvalidField(f"messages[{last}].content", content, "a text, or a list of parts")
    return found | {"messages": [*turns[:last], {**turns[last], "content": [*parts, *written]}, *turns[last + 1 :]]}


def _urls(name: str, value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    for entry in found:
        if not isinstance(entry, str):
            shown = f"{len(entry)} bytes" if isinstance(entry, bytes | bytearray | memoryview) else entry
            raise InvalidField(name, shown, _IMAGES)
    return found


def _is_user(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def data_url(value: Any) -> str | None:
    """Return the ``data:`` URL of an image: a file's bytes as they are, or an image of Pillow as PNG.

    None for anything else, also for bytes that begin like no image that is read.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        kind = next((kind for at, start, kind in BEGINNINGS if data[at : at + len(start)] == start), None)
        return None if kind is None else f"data:{kind};base64,{base64.b64encode(data).decode()}"
    pillow = sys.modules.get("PIL.Image")  # without it, no value is an image of Pillow
    if pillow is None or not isinstance(value, pillow.Image):
        return None
    written = io.BytesIO()
    image = value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else value.convert("RGB")
    image.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
