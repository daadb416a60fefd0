"""Split a model with adapters into the base as it was before them, and each adapter in peft's layout.

peft replaces modules in place: ``q_proj`` becomes a wrapper with the old module as its ``base_layer``, and a module in
``modules_to_save`` becomes a wrapper with the old module as its ``original_module``. The base is written through a
second model of the same class, which is built without memory and given the old tensors, so nothing is copied and the
caller's object is not touched.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError
from .pretrained import save_pretrained


def has_adapters(model: Any) -> bool:
    """Return whether ``model`` is a ``PeftModel``, or a transformers model with adapters added to it."""
    from peft import PeftModel

    return isinstance(model, PeftModel) or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_names(model: Any) -> list[str]:
    """Return the names of the adapters in a model for which ``has_adapters`` is true."""
    return list(model.peft_config)


def save_pristine_base(model: Any, target: Path) -> None:
    """Write the base of ``model`` to ``target``. Raises ``PackagingError`` if an adapter is merged into it."""
    import torch

    base = _base(model)
    wrappers = _wrappers(base)
    tensors = {}
    for name, tensor in base.state_dict().items():
        if (pristine := _pristine_name(name, wrappers)) is not None:
            tensors[pristine] = tensor
    with torch.device("meta"):
        clean = type(base)(copy.deepcopy(base.config))
    missing, unexpected = clean.load_state_dict(tensors, strict=False, assign=True)
    clean.tie_weights()
    if unexpected or any(parameter.is_meta for parameter in clean.parameters()):
        raise PackagingError(f"model: its base cannot be taken apart at {(unexpected or missing)[0]}")
    clean.generation_config = copy.deepcopy(getattr(base, "generation_config", None))
    save_pretrained(clean, target)


def _base(model: Any) -> Any:
    """Return the transformers model inside; peft's own method for this fails when all adapters were deleted."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model, PeftModel):
        return model
    return model.base_model.model if isinstance(model.base_model, BaseTuner) else model.base_model


def save_adapter(model: Any, name: str, target: Path) -> None:
    """Write adapter ``name`` of ``model`` to ``target``: adapter_config.json and adapter_model.safetensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    if name not in model.peft_config:
        raise PackagingError(f"adapters: the model has no adapter {name!r}; it has {', '.join(adapter_names(model))}")
    # "auto" would look the base up on the hub to see whether its vocabulary was resized; embeddings stay in the base
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if not hasattr(model, "get_base_model"):
        tensors = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
    target.mkdir(parents=True, exist_ok=True)
    plain = {key: tensor.detach().to("cpu").clone().contiguous() for key, tensor in tensors.items()}
    save_file(plain, str(target / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(str(target))


def _wrappers(base: Any) -> dict[str, str]:
    """Map the path of each wrapper to the name of the child that is the old module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrappers = {}
    for path, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            if module.merged:
                raise PackagingError(f"model: an adapter is merged into {path}; call unmerge_adapter() first")
            wrappers[path] = "base_layer"
        elif isinstance(module, AuxiliaryTrainingWrapper):
            wrappers[path] = "original_module"
    return wrappers


def _pristine_name(name: str, wrappers: dict[str, str]) -> str | None:
    """Map ``…q_proj.base_layer.weight`` to ``…q_proj.weight``; None for an adapter's tensor."""
    parts = name.split(".")
    kept = []
    skip = False
    for position, part in enumerate(parts):
        if skip:
            skip = False
        else:
            kept.append(part)
        child = wrappers.get(".".join(parts[: position + 1]))
        if child is not None:
            if parts[position + 1] != child:
                return None
            skip = True
    return ".".join(kept)
