"""The chat template that training leaves in an adapter's directory, without the tokenizer that may be beside it."""

from __future__ import annotations

import json
from pathlib import Path

from ..interface.errors import PackagingError

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
MAX_BYTES = 8 << 20


def own_template(directory: Path) -> str | list[dict[str, str]] | None:
    """Return the template in ``directory`` as its file has it; None if there is none. Raises ``PackagingError``."""
    for name in FILES:
        if found := _read(directory / name):
            return found
    return None


def default_of(own: str | list[dict[str, str]] | None) -> str | None:
    """Return the default one of the templates that ``own_template`` has found."""
    if not isinstance(own, list):
        return own
    found = {entry.get("name"): entry.get("template") for entry in own if isinstance(entry, dict)}
    return found.get("default") or next(iter(found.values()), None)


def _read(file: Path) -> str | list[dict[str, str]] | None:
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_BYTES:
            raise PackagingError(f"adapters: {file.name} has more than {MAX_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
        found = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise PackagingError(f"adapters: {file.name} in {file.parent.name} cannot be read") from None
    return found if isinstance(found, str | list) else None
