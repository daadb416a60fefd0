"""A user's message: its text, and the images that come with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...system.escape import visible_line
from .log_database import encoded

MAX_BYTES = 64 * 2**20
SIGNATURES = (  # where an image's bytes begin, and the type that they say
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def message(text: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a user's message; images come before the text, which is about them."""
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    return {"role": "user", "content": content}


def text_of(user: dict[str, Any]) -> str:
    content = user["content"]
    return str(content) if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def images_in(user: dict[str, Any]) -> list[dict[str, Any]]:
    content = user["content"]
    return [] if isinstance(content, str) else [part for part in content if part["type"] == "image_url"]


def image_file(path: str) -> dict[str, Any]:
    """Read an image into a part of a message. Raises ``ClickException`` for a file that is none."""
    shown = visible_line(path)
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise click.ClickException(f"{shown}: {getattr(error, 'strerror', None) or 'cannot be read'}") from None
    if len(content) > MAX_BYTES:
        raise click.ClickException(f"{shown}: larger than {MAX_BYTES // 2**20} MiB")
    media_type = next((kind for start, kind in SIGNATURES if content.startswith(start)), None)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        media_type = "image/webp"
    if media_type is None:
        raise click.ClickException(f"{shown}: not an image; expected PNG, JPEG, GIF or WebP")
    return encoded(media_type, content)
