"""Weights on disk: the shapes in safetensors headers, and pickled checkpoints converted to safetensors.

Pickles are read only here, and only when a model is logged, with ``torch.load(weights_only=True)``, which yields
tensors and plain containers and executes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason, shown

logger = logging.getLogger(__name__)

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.pt", "model.bin", "model.pt", "model.pth")
# as transformers looks for them, and then some names that it does not know
CHECKPOINTS = (SAFETENSORS, SAFETENSORS_INDEX, PICKLED[0], PICKLED_INDEX, *PICKLED[1:])
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Read the name and shape of every tensor in the safetensors files of ``directory``, from their headers alone."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="numpy") as stored:
                shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise PackagingError(f"{file.name} is not a readable safetensors file: {error}") from None
    return shapes


def place_weights(source: Path, target: Path, *, link: bool) -> None:
    """Put the weights of a Hugging Face directory into ``target`` as safetensors.

    Of several checkpoints in one directory, the one is taken that transformers loads, and a warning names the others:
    saving a model again in other shards leaves the old index behind. Safetensors files are taken unchanged; a pickled
    checkpoint is converted shard by shard. Raises ``PackagingError`` if there are no weights or a shard is missing.
    """
    present = [name for name in CHECKPOINTS if (source / name).is_file()]
    if not present:
        raise PackagingError(f"{source.name} holds no weights; expected one of {', '.join(CHECKPOINTS)}")
    chosen, others = present[0], present[1:]
    _refuse_other_weights(source, chosen)
    if others:
        logger.warning("the weights are those in %s, which transformers prefers to %s", chosen, ", ".join(others))
    if chosen == SAFETENSORS:
        place_file(source / SAFETENSORS, target, link=link)
    elif chosen == SAFETENSORS_INDEX:
        place_file(source / SAFETENSORS_INDEX, target, link=link)
        for shard in _shards(source / SAFETENSORS_INDEX):
            place_file(source / shard, target, link=link)
    elif chosen == PICKLED_INDEX:
        _convert_shards(source, target)
    else:
        convert(source / chosen, target / SAFETENSORS)


def _refuse_other_weights(source: Path, chosen: str) -> None:
    """Refuse a config whose ``transformers_weights`` names another file, which transformers would load."""
    try:
        named = json.loads((source / "config.json").read_bytes()).get("transformers_weights")
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # code that needs the file reports what is wrong with it
    if named not in (None, chosen):
        raise PackagingError(
            f"model: config.json of {source.name}: transformers_weights = {shown(named)} is not supported; expected"
            f" {chosen}, the weights in the directory"
        )


def place_file(
    source: Path, target_dir: Path, *, link: bool, name: str | None = None, within: Path | None = None
) -> None:
    """Hard-link or copy one file. Symbolic links are resolved first and must stay ``within`` (None: its directory)."""
    real = real_file(source, within or source.parent)
    if not real.is_file():
        raise PackagingError(f"{source.name} is listed in {source.parent.name} but is not there")
    target = target_dir / (name or source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(real, target)
            return
        except OSError:
            pass  # another file system, or one without hard links
    shutil.copyfile(real, target)


def real_file(source: Path, within: Path) -> Path:
    """Resolve the symbolic links of ``source``. Raises ``PackagingError`` if the result is outside ``within``.

    A link in a downloaded model could point at any file on this machine. The only exception is a snapshot in the hub's
    cache, which may link to the blobs beside it.
    """
    real, root = source.resolve(), within.resolve()
    allowed = [root]
    for place in (root, *root.parents):  # ``within`` may also be a folder inside a snapshot
        if place.parent.name == "snapshots" and (place.parent.parent / "blobs").is_dir():
            allowed.append((place.parent.parent / "blobs").resolve())
            break
    if not any(real.is_relative_to(place) for place in allowed):
        raise PackagingError(f"{source.name} is a symbolic link that leaves {within.name}; it is not followed")
    return real


def convert(pickled: Path, target: Path, within: Path | None = None) -> list[str]:
    """Write the tensors of a pickled state dict as safetensors and return their names. Raises ``PackagingError``."""
    from safetensors.torch import save_file

    tensors = _separate(_load(real_file(pickled, within or pickled.parent)))
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(target), metadata={"format": "pt"})
    return list(tensors)


def _convert_shards(source: Path, target: Path) -> None:
    shards = _shards(source / PICKLED_INDEX)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        if not (source / shard).is_file():
            raise PackagingError(f"{shard} is listed in {PICKLED_INDEX} but is not there")
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(convert(source / shard, target / name), name)
    total = sum((target / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(real_file(index, index.parent).read_text())["weight_map"].values())
    except PackagingError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise PackagingError(f"{index.name} is not an index of weights") from None
    if escaping := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise PackagingError(f"{index.name}: {escaping[0]!r} is not a plain file name")
    return sorted(names)


def _load(pickled: Path) -> dict[str, Any]:
    """Return the state dict in ``pickled``, possibly wrapped as ``{"state_dict": …}``."""
    import torch

    try:
        loaded = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise anything for a damaged pickle
        raise PackagingError(
            f"{pickled.name} cannot be converted: it is damaged or holds more than tensors ({reason(error)[:120]});"
            " save it as safetensors"
        ) from None
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)} if isinstance(loaded, dict) else {}
    if not tensors:
        raise PackagingError(f"{pickled.name} holds no tensors by name")
    return tensors


def _separate(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors that share memory, such as tied weights (safetensors cannot store them); make views contiguous."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size()
        separate[name] = tensor.clone().contiguous() if shared else tensor.contiguous()
        seen.add(storage.data_ptr())
    return separate
