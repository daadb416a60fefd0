"""Find a model's end-of-text ids in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..interface.errors import PackagingError, reason


def eos_ids(model_dir: str, tokenizer: Any) -> tuple[int, ...]:
    """Collect the ids in the generation config (a chat model has one for a turn and one for a text), the config and the
    tokenizer, in this order."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        value = _json(path).get("eos_token_id") if path.is_file() else None
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, int) and entry >= 0:
                found[entry] = None
    if tokenizer.eos_token_id is not None:
        found[tokenizer.eos_token_id] = None
    return tuple(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackagingError(f"{path.name} cannot be read: {reason(error)}") from None
    if not isinstance(found, dict):
        raise PackagingError(f"{path.name} does not hold a JSON object")
    return found
