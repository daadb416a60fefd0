"""Cross-encoders: how to recognise them, and what their files say about the score of a pair.

::

    config.json                         architectures …ForSequenceClassification, id2label with one label;
                                        sentence_transformers.activation_fn (before 4.0 sbert_ce_default_…)
    config_sentence_transformers.json   model_type CrossEncoder, activation_fn (from 5.4 on)
    modules.json                        if present, one Transformer
    tokenizer_config.json               model_max_length
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....serving.interface.bundle import CrossEncoderSpec
from ....serving.interface.errors import PackagingError, shown
from ....serving.interface.request import Activation

ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Tanh": "tanh"}  # of torch.nn
HEAD = "ForSequenceClassification"
UNBOUNDED = 10**9  # tokenizers without a maximum length give this or more


def has_head(config: dict[str, Any]) -> bool:
    """Return whether the architecture ends in a classifier."""
    return any(str(name).endswith(HEAD) for name in config.get("architectures") or ())


def num_labels(config: dict[str, Any]) -> int:
    """Return the number of labels as transformers counts them: two by default."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(config.get("num_labels") or 2)


def is_cross_encoder(model_dir: Path, config: dict[str, Any]) -> bool:
    """Return whether the model gives a pair of texts one number. Raises ``PackagingError`` if it has modules of its
    own."""
    kinds = _modules(model_dir)
    if kinds and not says_cross_encoder(model_dir):
        return False
    if kinds and kinds != ["Transformer"]:
        raise PackagingError(
            f"cross-encoder modules {', '.join(kinds)} are not supported; expected one Transformer with a classifier"
        )
    return has_head(config) and num_labels(config) == 1


def says_cross_encoder(model_dir: Path) -> bool:
    """Return whether the files of sentence-transformers say that this is a cross-encoder."""
    return _read(model_dir / "config_sentence_transformers.json").get("model_type") == "CrossEncoder"


def check_score(model_dir: Path, config: dict[str, Any]) -> None:
    """Raise ``PackagingError`` if the model cannot answer "score"."""
    if is_cross_encoder(model_dir, config):
        return
    names = ", ".join(map(str, config.get("architectures") or ())) or "none"
    labels = f" of {num_labels(config)} labels" if has_head(config) else ""
    raise PackagingError(
        f"task: 'score' needs a cross-encoder, an architecture …{HEAD} with one label; this one is {names}{labels}. "
        "Models logged for embeddings compare texts without it"
    )


def read_cross_encoder(model_dir: Path, tokenizer_dir: Path, config: dict[str, Any]) -> CrossEncoderSpec:
    """Read the activation and the maximum length of a pair as sentence-transformers does. Raises ``PackagingError``."""
    own, library = config.get("sentence_transformers"), _read(model_dir / "config_sentence_transformers.json")
    if library.get("default_prompt_name") is not None:
        raise PackagingError("default_prompt_name: a cross-encoder with a prompt is not supported; expected null")
    named = (
        library.get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    max_length = _read(tokenizer_dir / "tokenizer_config.json").get("model_max_length")
    bounded = isinstance(max_length, int) and 0 < max_length < UNBOUNDED
    return CrossEncoderSpec(activation=_activation(named), max_length=max_length if bounded else None)


def _activation(named: Any) -> Activation:
    if named is None:
        return "sigmoid"
    module, _, name = str(named).rpartition(".")
    if not module.startswith("torch.nn") or name not in ACTIVATIONS:
        raise PackagingError(
            f"activation_fn: {shown(named)} is not supported; expected one of torch.nn's {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _modules(model_dir: Path) -> list[str]:
    """Return the classes of the modules in a sentence-transformers directory."""
    entries = _json(model_dir / "modules.json")
    named = [entry.get("type") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [str(name).rpartition(".")[2] for name in named]


def _read(file: Path) -> dict[str, Any]:
    found = _json(file)
    return found if isinstance(found, dict) else {}


def _json(file: Path) -> Any:
    """Return the parsed file, or None if it does not exist. Raises ``PackagingError``."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise PackagingError(f"model: {file.name} is not valid JSON") from None
