"""LoRA adapters of a model: named, written in peft's layout, and checked against the base."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, shown
from ..model.manifest import is_adapter_name
from .checkpoints import convert, place_file, real_file
from .meta_model import linear_shapes
from .peft_split import adapter_names, has_adapters, save_adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"


def check_name(name: Any) -> str:
    """Return ``name`` if it is valid as a folder and in ``endpoint:adapter`` requests. Raises ``PackagingError``."""
    if not isinstance(name, str) or not is_adapter_name(name):
        raise PackagingError(
            f"adapters: the name {shown(name)} is not allowed; expected up to 128 letters, digits, '_', '-' and '.',"
            " not starting with '-' or '.' and not ending with '.'"
        )
    return name


def place_adapters(adapters: dict[str, Any] | None, peft_model: Any, root: Path, *, link: bool = False) -> list[str]:
    """Write ``adapters`` and those inside ``peft_model`` under ``root/adapters`` and return their names, sorted.

    Raises ``PackagingError``.
    """
    if adapters is not None and not isinstance(adapters, dict):
        raise PackagingError(f"adapters: {shown(adapters)} is not allowed; expected {{name: PeftModel or directory}}")
    given = {check_name(name): source for name, source in (adapters or {}).items()}
    inside = [] if peft_model is None else [check_name(name) for name in peft_model.peft_config]
    if twice := sorted(set(inside) & given.keys()):
        raise PackagingError(f"adapters: {twice[0]!r} is also an adapter of the model; choose another name")
    for name in inside:
        _place_from_model(peft_model, name, root / "adapters" / name)
    for name, source in given.items():
        _place_one(name, source, root / "adapters" / name, link=link)
    return sorted([*inside, *given])


def check_adapters(names: list[str], root: Path, skeleton: Any) -> None:
    """Raise ``PackagingError`` for the first adapter whose type, modules or shapes do not fit the base."""
    from ....serving.engine.adapters.files import check_fits, of_decoder, read_adapter
    from ....serving.engine.adapters.virtual_tokens import embedding_width

    shapes, head = linear_shapes(skeleton)
    width = embedding_width(skeleton)
    for name in names:
        check_fits(of_decoder(read_adapter(root / "adapters" / name), shapes), shapes, head=head, width=width)


def _place_one(name: str, source: Any, target: Path, *, link: bool) -> None:
    if isinstance(source, str | os.PathLike):
        _place_directory(name, Path(source).expanduser(), target, link=link)
        return
    if not has_adapters(source):
        raise PackagingError(
            f"adapters: {name!r} is a {type(source).__name__}; expected a PeftModel or a directory in peft's layout"
        )
    inside = adapter_names(source)
    if not inside:
        raise PackagingError(f"adapters: the model given for {name!r} has no adapters; all were deleted")
    if name not in inside and len(inside) > 1:
        raise PackagingError(
            f"adapters: the model given for {name!r} has several adapters ({', '.join(inside)}) and none of that name"
        )
    _place_from_model(source, name if name in inside else inside[0], target)


def _place_from_model(model: Any, name: str, target: Path) -> None:
    save_adapter(model, name, target)
    _write_config(_read_config(target / CONFIG), target / CONFIG)


def _place_directory(name: str, source: Path, target: Path, *, link: bool) -> None:
    if not (source / CONFIG).is_file():
        raise PackagingError(f"adapters: {name!r}: {source.name} holds no {CONFIG}")
    target.mkdir(parents=True, exist_ok=True)
    if (source / WEIGHTS).is_file():
        place_file(source / WEIGHTS, target, link=link)
    elif (source / PICKLED_WEIGHTS).is_file():
        convert(source / PICKLED_WEIGHTS, target / WEIGHTS)
    else:
        raise PackagingError(f"adapters: {name!r}: {source.name} holds no {WEIGHTS}")
    _write_config(_read_config(source / CONFIG), target / CONFIG)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(real_file(file, file.parent).read_text())
    except PackagingError:
        raise
    except (OSError, ValueError, RecursionError):
        raise PackagingError(f"adapters: {CONFIG} in {file.parent.name} is not valid JSON") from None
    if not isinstance(config, dict):
        raise PackagingError(f"adapters: {CONFIG} in {file.parent.name} is not an object")
    return config


def _write_config(config: dict[str, Any], file: Path) -> None:
    """Write ``config``, without the base's name unless it is a hub id: a path means nothing on another machine."""
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and (not re.fullmatch(r"[\w.-]+/[\w.-]+", base) or base.startswith(".")):
        config = config | {"base_model_name_or_path": None}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
