"""Models that are not logged yet (Hugging Face directories, GGUF files, hub ids): recognise them, and refuse them."""

from __future__ import annotations

from pathlib import Path

from ....serving.interface.errors import ModelNotFound, PackagingError, shown
from ....serving.model_files.model_uri import is_path
from .hub import HUB_ID
from .manifest import MANIFEST

MODEL_FILES = ("config.json", "modules.json")  # every Hugging Face model directory has one of these


def source_of(uri: str) -> str | Path | None:
    """Return the Hugging Face directory, GGUF file or hub id that ``uri`` names; None for anything else."""
    path = Path(uri).expanduser()
    if path.is_dir():
        found = not (path / MANIFEST).is_file() and any((path / name).is_file() for name in MODEL_FILES)
        return path if found else None
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    return uri if "/" in uri and HUB_ID.fullmatch(uri) else None


def check_logged(uri: str) -> None:
    """Raise ``PackagingError`` or ``ModelNotFound``, which say how to log the model, if ``uri`` is not a logged one."""
    source = source_of(uri)
    how = f"log it first, with llm.log_model(model={uri!r}, …) or llm.save_model(path, model={uri!r})"
    directly = f"or serve it as it is: mlflow-llm serve -m {uri}"
    if isinstance(source, Path):
        kind = "a Hugging Face directory" if source.is_dir() else "a GGUF file"
        raise PackagingError(f"{shown(uri)} is {kind}, not a logged model: {how}, {directly}")
    path = Path(uri).expanduser()
    if source is not None:
        raise ModelNotFound(f"there is no directory {shown(uri)} here; should it be a hub id: {how}, {directly}")
    if path.is_dir() and (path / "adapter_config.json").is_file():
        raise PackagingError(
            f"{shown(uri)} is a LoRA adapter, not a logged model: log it over its base, with"
            f' llm.log_model(base="models:/<name>/<version>", adapters={{"name": {uri!r}}}, …)'
        )
    if path.is_file():
        raise PackagingError(
            f"{shown(uri)} is a file; expected a model's directory, a GGUF file, models:/<name>/<version>, or a hub id"
        )
    if not path.exists() and is_path(uri):
        raise ModelNotFound(f"there is no directory {shown(uri)}; expected one, models:/<name>/<version>, or a hub id")
