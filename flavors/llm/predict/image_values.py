"""Images that callers in Python have as objects: the bytes of a file, or an image of Pillow."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

BEGINNINGS = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
)


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
