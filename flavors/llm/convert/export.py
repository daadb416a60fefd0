"""``export``: write a logged model as a Hugging Face directory, which transformers, peft and others load."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....serving.engine.weights.stored_weights import FORMATS
from ....serving.interface.bundle import ADAPTER_TEMPLATE, Bundle
from ....serving.interface.errors import PackagingError, shown
from ..errors import raises_mlflow
from ..model import bundle_reader
from ..model.fetch import local_root
from ..model.tasks import config_file, read_config
from ..model.templates import DEFAULT
from ..save.tokenizers import NAMED_TEMPLATES
from . import generation_config, sentence_files
from .merge import merged_model
from .model_card import write_card

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
ADAPTERS = "adapters"


class Export(Struct, frozen=True, kw_only=True):
    """A model to be exported: the adapter to merge, and those to write beside it."""

    bundle: Bundle
    root: Path
    uri: str
    merge: str | None
    beside: tuple[str, ...]


@raises_mlflow
def export(
    model_uri: str | os.PathLike[str],
    path: str | os.PathLike[str],
    merge: str | None = None,
    adapters: Sequence[str] | None = None,
) -> Path:
    """Write the logged model at ``model_uri`` to the local directory ``path`` in the form of Hugging Face's libraries.

    The directory holds the weights, the configuration, the tokenizer with the chat templates, a
    ``generation_config.json`` with the model's default sampling, the licence's files, and a model card with the
    lineage. ``AutoModelForCausalLM.from_pretrained(path)`` and ``AutoTokenizer.from_pretrained(path)`` load it; an
    embedding model is also a directory of sentence-transformers. Adapters are in ``path/adapters/NAME``, each for
    ``PeftModel.from_pretrained(model, path/adapters/NAME)``.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        path: where to write; the directory must be empty or not exist yet.
        merge: the adapter to merge into the weights, which are then those of this adapter alone.
        adapters: the adapters to write beside the base. None: all of them, or none with ``merge``.

    Returns:
        ``path``, made absolute.

    Raises:
        MlflowException: ``errors.ModelNotFound`` if there is no such model; ``errors.PackagingError`` for an adapter
            that the model does not have or that cannot be merged, and for weights in a form that Hugging Face's
            libraries do not read.
    """
    target = Path(path).absolute()
    existed = target.exists()
    if target.is_file() or (existed and any(target.iterdir())):
        raise PackagingError(f"path: {target.name} already exists and is not empty")
    root = local_root(model_uri)
    bundle, config = bundle_reader.configured(root)
    chosen = _chosen(bundle, root, str(model_uri), merge, adapters)
    _check_weights(Path(bundle.model_dir), merge)
    target.mkdir(parents=True, exist_ok=True)
    try:
        _write(chosen, config, target)
    except BaseException:
        for child in target.iterdir() if existed else [target]:
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        raise
    return target


def _write(chosen: Export, config: Any, target: Path) -> None:
    bundle = chosen.bundle
    source = Path(bundle.model_dir)
    merged = None if chosen.merge is None else merged_model(source, Path(bundle.adapters[chosen.merge]))
    weights = _weights_beside(config_file(source)) if merged is not None else set()
    for file in sorted(source.rglob("*")):
        if file.is_file() and file not in weights:
            _copy(file, target / file.relative_to(source))
    transformer = target / config_file(source).parent.relative_to(source)
    if merged is not None:
        merged.save_pretrained(str(transformer))
    _write_tokenizer(chosen, transformer)
    for name in chosen.beside:
        shutil.copytree(bundle.adapters[name], target / ADAPTERS / name, copy_function=shutil.copyfile)
    unsaid = {}
    if not {"embeddings", "score"}.intersection(bundle.tasks):
        unsaid = generation_config.write(source, transformer, config.request_defaults)
    elif bundle.embedding is not None:
        unsaid = sentence_files.write(bundle.embedding, target, transformer)
    if unsaid:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in unsaid.items())
        logger.warning("not part of the export, for which the form has no place: %s", listed)
    write_card(target, chosen.root, uri=chosen.uri, merge=chosen.merge, beside=chosen.beside, unsaid=unsaid)


def _chosen(bundle: Bundle, root: Path, uri: str, merge: Any, adapters: Any) -> Export:
    """Return what to export. Raises ``PackagingError`` for adapters that the model does not have."""
    if merge is not None and adapters:
        raise PackagingError(
            f"adapters: {shown(list(adapters))} is not allowed with merge=; expected None: the weights are those of"
            f" {shown(merge)}, and other adapters do not fit them"
        )
    if isinstance(adapters, str):
        raise PackagingError(f"adapters: {shown(adapters)} is not allowed; expected a list of names")
    named = [("merge", merge)] if merge is not None else [("adapters", one) for one in adapters or ()]
    for field, name in named:
        if name not in bundle.adapters:
            known = ", ".join(sorted(bundle.adapters)) or "none"
            raise PackagingError(f"{field}: {shown(name)} is not an adapter of the model; it has {known}")
    beside = sorted(bundle.adapters) if adapters is None and merge is None else sorted(set(adapters or ()))
    return Export(bundle=bundle, root=root, uri=uri, merge=merge, beside=tuple(beside))


def _check_weights(model_dir: Path, merge: str | None) -> None:
    """Raise ``PackagingError`` for weights in a form of this package, and for a merge into quantised weights."""
    said = read_config(model_dir).get("quantization_config")
    if not isinstance(said, dict):
        return
    name = shown(said.get("quant_method"))
    own = (said.get("quant_method"), said.get("format")) == FORMATS["int4"] or "transform_config" in said
    if own:
        raise PackagingError(
            "model_uri: the weights were quantised when the model was logged (quantize=), in a form that Hugging Face's"
            " libraries do not read; export the model that it was made of, logged without quantize="
        )
    if merge is not None:
        raise PackagingError(
            f"merge: {shown(merge)} is not allowed; expected None: the weights are quantised ({name}), and an adapter"
            " is merged only into floats; without merge= it is written beside them"
        )


def _weights_beside(config: Path) -> set[Path]:
    folder = config.parent
    return {*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_tokenizer(chosen: Export, target: Path) -> None:
    """Write the tokenizer's files, and the templates of the model where transformers looks for them."""
    bundle = chosen.bundle
    source = Path(bundle.tokenizer_dir)
    for file in sorted(source.rglob("*")):
        # a config.json is there only to name the tokenizer's class
        if file.is_file() and file.name != "config.json":
            _copy(file, target / file.relative_to(source))
    templates = dict(bundle.chat_templates)
    if chosen.merge is not None:
        own = Path(bundle.adapters[chosen.merge]) / ADAPTER_TEMPLATE
        templates |= {DEFAULT: str(own)} if own.is_file() else {}
    if not templates:
        return
    shutil.rmtree(target / NAMED_TEMPLATES, ignore_errors=True)
    (target / "chat_template.json").unlink(missing_ok=True)
    _forget_template(target / TOKENIZER_CONFIG)
    for name, file_name in templates.items():
        _copy(Path(file_name), target / (TEMPLATE if name == DEFAULT else f"{NAMED_TEMPLATES}/{name}.jinja"))


def _forget_template(file: Path) -> None:
    """Remove the template from tokenizer_config.json, where the model's own takes its place."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return
    if config.pop("chat_template", None) is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
