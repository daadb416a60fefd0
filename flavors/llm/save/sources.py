"""Write a model from any of its sources to ``model/`` as config and safetensors.

The files of a Hugging Face directory are copied or linked, and none is loaded into memory. A hub id is fetched first
(``hub``); a GGUF file is dequantised to float32 (``gguf_file``); a model object is saved (``pretrained``); and a
``PeftModel`` is split into its base and its adapters (``peft_split``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ....serving.interface.errors import PackagingError, shown
from ..model.hub import HUB_ID, fetch_snapshot
from .checkpoints import PICKLED_SUFFIXES, convert, place_file, place_weights
from .gguf.file import place_gguf
from .peft_split import has_adapters, save_pristine_base
from .pretrained import save_pretrained
from .quantised import check_directory
from .tokenizers import is_tokenizer_file

# Weights of other frameworks and the state of a training run: not part of a model to serve.
OTHER_FORMATS = (*PICKLED_SUFFIXES, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite")
OTHER_FILES = frozenset({"trainer_state.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"})


class Placed(Struct, frozen=True, kw_only=True):
    """The objects given with a model: its tokenizer (or a directory), and a ``PeftModel`` with adapters to save."""

    tokenizer: Any = None
    peft_model: Any = None


def place_model(
    model: Any, target: Path, *, link: bool = False, revision: str | None = None, any_weights: bool = False
) -> Placed:
    """Write ``model`` to the directory ``target``.

    ``link`` hard-links local files; ``revision`` is that of a hub repository. With ``any_weights`` those of a directory
    may be quantised already. Raises ``PackagingError`` for an unknown form, or files that cannot be read.
    """
    target.mkdir(parents=True, exist_ok=True)
    if revision is not None and not _is_hub_id(model):
        raise PackagingError(f"revision: {shown(revision)} is not allowed; expected None: the model is not a hub id")
    if isinstance(model, str | os.PathLike):
        return _place_path(model, target, link=link, revision=revision, any_weights=any_weights)
    from transformers import PreTrainedModel

    if has_adapters(model):
        save_pristine_base(model, target)
        return Placed(peft_model=model)
    if isinstance(model, PreTrainedModel):
        save_pretrained(model, target)
        return Placed()
    raise PackagingError(
        f"model: a {type(model).__name__} is not allowed; expected a transformers PreTrainedModel, a PeftModel, a"
        " Hugging Face or sentence-transformers directory, a GGUF file, or a hub id"
    )


def _place_path(
    model: str | os.PathLike[str], target: Path, *, link: bool, revision: str | None, any_weights: bool
) -> Placed:
    path = Path(model).expanduser()
    if path.is_dir():
        return _place_directory(path, target, link=link, any_weights=any_weights)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise PackagingError(f"model: {path.name} is not allowed; a single file must be a GGUF file")
        return Placed(tokenizer=place_gguf(path, target))
    if _is_hub_id(model):
        found = fetch_snapshot(str(model), revision)
        return _place_directory(found, target, link=link, any_weights=any_weights)
    raise PackagingError(f"model: {shown(str(model))} is neither a directory, nor a file, nor a hub id")


def _is_hub_id(model: Any) -> bool:
    """Return whether ``model`` names nothing on this machine and may name a model on the hub."""
    return isinstance(model, str) and HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _place_directory(source: Path, target: Path, *, link: bool, any_weights: bool) -> Placed:
    if not (source / "config.json").is_file() and not (source / "modules.json").is_file():
        if (source / "adapter_config.json").is_file():
            raise PackagingError(
                f'model: {source.name} holds an adapter, not a model; pass it as adapters={{"name": …}} beside its'
                " base, or with base= for one that is registered"
            )
        raise PackagingError(f"model: {source.name} holds no config.json")
    _check_modules(source)
    transformer = _transformer_folder(source)
    if not any_weights:
        check_directory(transformer)
    for relative in _plain_files(source, transformer):
        place_file(source / relative, target, link=link, name=relative, within=source)
    place_weights(transformer, target / transformer.relative_to(source), link=link)
    for module in _further_modules(source, transformer):
        _place_module_weights(module, target / module.relative_to(source), source, link=link)
    return Placed(tokenizer=transformer)


def _transformer_folder(source: Path) -> Path:
    """Return the folder with the Hugging Face model in a sentence-transformers directory: its root, or ``0_…``."""
    if (source / "config.json").is_file():
        return source
    inside = sorted(p.parent for p in source.glob("0_*/config.json"))
    if not inside:
        raise PackagingError(f"model: {source.name} has modules.json but no transformer with a config.json")
    return inside[0]


def _check_modules(source: Path) -> None:
    """Raise ``PackagingError`` for a sentence-transformers directory of modules that cannot be run."""
    from ..model.cross_encoders import says_cross_encoder

    if (source / "modules.json").is_file() and not says_cross_encoder(source):
        from ....serving.engine.models.sentence_files import check_modules

        try:
            check_modules(source)
        except PackagingError as error:
            raise PackagingError(f"model: {error}") from None


def _further_modules(source: Path, transformer: Path) -> Iterator[Path]:
    """Return the folders of sentence-transformers modules: ``1_Pooling``, ``2_Dense``, …"""
    if (source / "modules.json").is_file():
        from ....serving.engine.models.sentence_files import modules_of

        folders = dict.fromkeys(source / module.path for module in modules_of(source) if module.path)
        yield from (folder for folder in folders if folder != transformer and folder.is_dir())


def _place_module_weights(module: Path, target: Path, source: Path, *, link: bool) -> None:
    if (module / "model.safetensors").is_file():
        place_file(module / "model.safetensors", target, link=link, within=source)
    elif (module / "pytorch_model.bin").is_file():
        convert(module / "pytorch_model.bin", target / "model.safetensors", source)


def _plain_files(source: Path, transformer: Path) -> Iterator[str]:
    """Return the relative paths of config, code and notes: everything except weights, tokenizer and hidden files."""
    folders = [source, transformer, *_further_modules(source, transformer)]
    for file in (f for folder in dict.fromkeys(folders) for f in sorted(folder.iterdir())):
        hidden = file.name.startswith(".")
        foreign = file.suffix.lower() in OTHER_FORMATS or file.name in OTHER_FILES or is_tokenizer_file(file.name)
        if file.is_file() and not hidden and not foreign and not file.name.startswith("adapter_"):
            yield file.relative_to(source).as_posix()
