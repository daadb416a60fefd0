"""A model's tokenizer: write it to ``tokenizer/`` from a directory or an object, load it, and check it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason, shown
from ..model.hub import HUB_ID, fetch_snapshot
from .checkpoints import place_file, read_shapes

TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
TOKENIZER_SUFFIXES = (".tiktoken",)
NAMED_TEMPLATES = "additional_chat_templates"
# The last part of the input embedding's name, which differs by model family.
EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
    "shared.weight",
)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of this name belongs to the tokenizer rather than to the model."""
    return name in TOKENIZER_FILES or name.endswith(TOKENIZER_SUFFIXES)


def place_tokenizer(tokenizer: Any, target: Path, *, link: bool = False) -> None:
    """Write ``tokenizer`` (an object, a directory, or a hub id) to ``target``. Raises ``PackagingError``."""
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, str | os.PathLike):
        _place_directory(_directory(tokenizer), target, link=link)
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(target))
    else:
        raise PackagingError(
            f"tokenizer: a {type(tokenizer).__name__} is not allowed; expected a transformers tokenizer or a directory"
        )


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer in ``directory``, with the chat template that a processor keeps beside it.

    Raises ``PackagingError`` with the reason if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    from ....serving.tasks.prompt.tokenizer_check import check_fast, check_tokenizer

    check_tokenizer(directory)
    try:
        found = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions; a tokenizer's own code may raise anything
        raise PackagingError(f"tokenizer: it cannot be loaded: {reason(error)}") from None
    check_fast(found)
    if getattr(found, "chat_template", None) is None:
        found.chat_template = _template_of_processor(directory)
    return found


def _template_of_processor(directory: Path) -> str | None:
    """Return the template in ``chat_template.json``, where processors of earlier releases of transformers kept
    theirs."""
    try:
        found = json.loads((directory / "chat_template.json").read_text())["chat_template"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def check_vocabulary(tokenizer: Any, model_dir: Path) -> None:
    """Raise ``PackagingError`` if the tokenizer can produce an id for which the embedding has no row."""
    shapes = read_shapes(model_dir)
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDING_NAMES)), None)
    if rows is None:
        return
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= rows:
        raise PackagingError(
            f"tokenizer: token {shown(token)} has id {highest} but the model's embedding has {rows} rows; resize the"
            " embedding or pass the tokenizer that belongs to the model"
        )


def _directory(tokenizer: str | os.PathLike[str]) -> Path:
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return path
    if isinstance(tokenizer, str) and HUB_ID.fullmatch(tokenizer):
        return fetch_snapshot(tokenizer, None)
    raise PackagingError(f"tokenizer: {shown(str(tokenizer))} is neither a directory nor a hub id")


def _place_directory(source: Path, target: Path, *, link: bool) -> None:
    files = [file for file in sorted(source.iterdir()) if file.is_file() and is_tokenizer_file(file.name)]
    if not any(not file.name.startswith("chat_template") for file in files):
        raise PackagingError(f"tokenizer: {source.name} holds none; pass tokenizer= (an object or a directory)")
    for file in [*files, *sorted(source.glob(f"{NAMED_TEMPLATES}/*.jinja"))]:
        place_file(file, target, link=link, name=file.relative_to(source).as_posix(), within=source)
    config = _json(source / "tokenizer_config.json")
    # AutoTokenizer takes the class from config.json if tokenizer_config.json does not name it
    if "tokenizer_class" not in config and (source / "config.json").is_file():
        place_file(source / "config.json", target, link=link)
    if "auto_map" in config:
        for code in sorted(source.glob("*.py")):
            place_file(code, target, link=link)


def _json(file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise PackagingError(f"{file.name} is not valid JSON") from None
    return parsed if isinstance(parsed, dict) else {}
