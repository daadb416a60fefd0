"""The files by which sentence-transformers makes the vectors that an embedding model makes here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....serving.engine.models.sentence_files import LEGACY_KEYS, Module, modules_of, read_spec
from ....serving.interface.bundle import EmbeddingSpec
from ..model.tasks import read_config

PACKAGE = "sentence_transformers.models."
MODULES, TEXTS, LIMITS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"


def write(spec: EmbeddingSpec, target: Path, transformer: Path) -> dict[str, Any]:
    """Make the model in ``target`` a directory of sentence-transformers with the vectors of ``spec``.

    What its own files say already is left as it is. Returns what the library has no setting for.
    """
    found = read_spec(target, transformer)
    if found == spec:
        return {}
    modules = modules_of(target) or [Module("Transformer", ""), Module("Pooling", "1_Pooling")]
    own = found or EmbeddingSpec(pooling="", normalize=False)
    unsaid: dict[str, Any] = {}
    if spec.pooling != own.pooling:
        _write_pooling(spec.pooling, target / modules[1].path, target)
    # the library truncates after it has normalised, and does not normalise again
    if spec.normalize and spec.truncate_dim is not None:
        unsaid["normalize"] = True
    elif spec.normalize != own.normalize:
        plain = modules[:-1] if modules[-1].kind == "Normalize" else modules
        modules = [*plain, Module("Normalize", f"{len(plain)}_Normalize")] if spec.normalize else plain
    entries = [
        {"idx": place, "name": str(place), "path": module.path, "type": PACKAGE + module.kind}
        for place, module in enumerate(modules)
    ]
    if found is None or len(entries) != len(modules_of(target)):
        _write(target / MODULES, entries)
    if spec.max_length != own.max_length:
        _update(transformer / LIMITS, {"max_seq_length": spec.max_length})
    texts = {
        "prompts": spec.prompts,
        "default_prompt_name": spec.default_prompt,
        "truncate_dim": spec.truncate_dim,
        "model_type": "SentenceTransformer",
    }
    _update(target / TEXTS, texts)
    return unsaid


def _write_pooling(pooling: str, folder: Path, target: Path) -> None:
    modes = pooling.split("+")
    folder.mkdir(parents=True, exist_ok=True)
    width = read_config(target).get("hidden_size")
    values: dict[str, Any] = {"word_embedding_dimension": width} if isinstance(width, int) else {}
    _write(folder / "config.json", values | {key: mode in modes for key, mode in LEGACY_KEYS.items()})


def _update(file: Path, values: dict[str, Any]) -> None:
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    _write(file, known | values)


def _write(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
