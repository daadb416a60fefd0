"""A base that ``mlflow.transformers`` wrote with the modules of its adapters inside, made pristine again.

Of a peft model on a local base, it saves the wrapped modules (github.com/mlflow/mlflow/issues/23761)::

    …q_proj.base_layer.weight        the base's own …q_proj.weight
    …q_proj.lora_A.default.weight    the adapter's, which is in peft/ too
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

OWN = ("base_layer", "original_module")  # what peft's wrappers call the module that they wrap
INDEX = "model.safetensors.index.json"


def unwrap(folder: Path) -> bool:
    """Rewrite the safetensors in ``folder`` without the adapters' modules; return whether there were any."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as stored:
            files[file] = list(stored.keys())
    names = pristine_names(name for keys in files.values() for name in keys)
    if names is None:
        return False
    places: dict[str, str] = {}
    for file in files:
        tensors = {names[key]: tensor for key, tensor in load_file(str(file)).items() if key in names}
        file.unlink()  # it may be a link to the file of the source
        save_file(tensors, str(file), metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8")) | {"weight_map": places}
        (folder / INDEX).unlink()
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return True


def pristine_names(names: Iterable[str]) -> dict[str, str] | None:
    """Map each tensor of the base to its own name; None if no module is wrapped."""
    keys = list(names)
    wrapped = {module: own for key in keys for module, own in _wrapper(key)}
    if not wrapped:
        return None
    found = {}
    for key in keys:
        parts = key.split(".")
        module = next((".".join(parts[:end]) for end in range(1, len(parts)) if ".".join(parts[:end]) in wrapped), None)
        if module is None:
            found[key] = key
        elif key.startswith(f"{module}.{wrapped[module]}."):
            found[key] = key.replace(f"{module}.{wrapped[module]}.", f"{module}.", 1)
    return found


def _wrapper(key: str) -> Iterable[tuple[str, str]]:
    """Yield the wrapped module within the name of a tensor, and what its wrapper calls the old one."""
    for own in OWN:
        module, within, _ = key.partition(f".{own}.")
        if within:
            yield module, own
