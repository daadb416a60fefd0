"""The files of a model that ``mlflow.transformers`` saved, put together as a Hugging Face directory.

::

    MLmodel                 flavors.transformers: task, source_model_name, source_model_revision, peft_adaptor …
    model/                  config and weights, unless the model was saved as a reference
    components/tokenizer/   and image_processor/, feature_extractor/, processor/
    peft/                   the default adapter, and each other one in a folder of its name
    LICENSE.txt, model_card.md, model_card_data.yaml
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, shown
from ..model.hub import HUB_ID, fetch_snapshot
from ..save.adapters import CONFIG
from ..save.tokenizers import load_tokenizer
from .wrapped_base import unwrap

FLAVOR = "transformers"
PROCESSORS = ("image_processor", "feature_extractor", "processor")
NO_LICENCE = "A license file could not be found"
DTYPES = ("float32", "float16", "bfloat16")


def weights(root: Path, flavor: dict[str, Any], scratch: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return ``model``, ``tokenizer`` and ``revision`` for ``log_model``. Raises ``PackagingError``."""
    tokenizer = root / "components" / "tokenizer"
    found: dict[str, Any] = {"tokenizer": tokenizer} if tokenizer.is_dir() else {}
    if given.get("model") is not None:
        return found
    if flavor.get("model_binary"):
        return found | {"model": _assembled(root, flavor, scratch)}
    if (local := flavor.get("local_base_model_path")) is not None:
        if not Path(local).is_dir():
            raise PackagingError(
                f"model_uri: its base is referenced as {shown(local)}, which is not on this machine; expected model="
                " with the base's directory or hub id"
            )
        return found | {"model": local}
    name = flavor.get("source_model_name")
    if not isinstance(name, str) or not HUB_ID.fullmatch(name):
        raise PackagingError(
            f"model_uri: it was saved without its weights, by reference to {shown(name)}, which is no hub id; expected"
            " model= with the directory of the weights"
        )
    revision = flavor.get("source_model_revision")
    if not found:
        beside = str(flavor.get("tokenizer_name") or name)
        found["tokenizer"] = fetch_snapshot(beside, flavor.get("tokenizer_revision") if beside != name else revision)
    return found | {"model": name, "revision": revision}


def adapters(root: Path, flavor: dict[str, Any]) -> dict[str, Any]:
    """Return ``adapters`` and ``default_adapter`` for ``log_model``; {} for a model without adapters."""
    if not flavor.get("peft_adaptor"):
        return {}
    folder = root / str(flavor["peft_adaptor"])
    found = {"default": folder} if (folder / CONFIG).is_file() else {}
    found |= {one.parent.name: one.parent for one in sorted(folder.glob(f"*/{CONFIG}"))}
    if not found:
        raise PackagingError(f"model_uri: {folder.name}/ holds no {CONFIG}")
    return {"adapters": found, "default_adapter": next(iter(found))}


def changed_dtype(flavor: dict[str, Any], model: Any) -> str | None:
    """Return the type in which the pipeline loads the weights, if it is not the one in which they are stored."""
    asked = str(flavor.get("torch_dtype")).removeprefix("torch.")
    if asked not in DTYPES or not isinstance(model, Path):
        return None
    config = json.loads((model / "config.json").read_bytes())
    stored = config.get("dtype") or config.get("torch_dtype") or asked
    return None if stored == asked else asked


def code_paths(root: Path, flavor: dict[str, Any]) -> list[str] | None:
    """Return the files that were saved as ``code_paths``; None if there are none."""
    folder = root / str(flavor.get("code") or "")
    if not flavor.get("code") or not folder.is_dir():
        return None
    return [str(one) for one in sorted(folder.iterdir())]


def loaded_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer object of a directory, a hub id, or an object."""
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    path = Path(tokenizer)
    return load_tokenizer(path if path.is_dir() else fetch_snapshot(str(tokenizer), None))


def has_chat_template(tokenizer: Any) -> bool:
    return tokenizer is not None and bool(getattr(loaded_tokenizer(tokenizer), "chat_template", None))


def _assembled(root: Path, flavor: dict[str, Any], scratch: Path) -> Path:
    """Return a directory with the files of the model as Hugging Face's libraries have them; weights are linked."""
    name = Path(str(flavor.get("source_model_name") or "")).name
    target = scratch / "assembled" / (name or "model")
    target.mkdir(parents=True)
    folders = [root / "model", *(root / "components" / one for one in PROCESSORS)]
    for file in (file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*"))):
        folder = next(one for one in folders if file.is_relative_to(one))
        place = target / file.relative_to(folder)
        if file.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(file, place)
    if flavor.get("peft_adaptor"):
        unwrap(target)
    licence = root / "LICENSE.txt"
    if licence.is_file() and NO_LICENCE not in licence.read_text(encoding="utf-8", errors="replace"):
        shutil.copyfile(licence, target / "LICENSE.txt")
    _write_card(root, target / "README.md")
    return target


def _write_card(root: Path, file: Path) -> None:
    text, data = root / "model_card.md", root / "model_card_data.yaml"
    if file.exists() or not text.is_file():
        return
    head = f"---\n{data.read_text(encoding='utf-8').strip()}\n---\n\n" if data.is_file() else ""
    file.write_text(head + text.read_text(encoding="utf-8"), encoding="utf-8")


def linked(source: Path, target: Path) -> None:
    """Make ``target`` a directory with the files of ``source``, which share their bytes where that is possible."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            _link(file, target / file.relative_to(source))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
