"""Quantise the linears of a model's files, as ``stored_weights.py`` reads them. Done once, when a model is logged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from msgspec import Struct
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from ...interface.errors import PackagingError
from ...interface.settings import EngineSettings
from ..attention import latent_attention
from ..devices import openmp
from ..devices.cpu_contention import Contention
from ..models.loader import POOLER, from_pretrained
from ..native.library import GROUP
from ..weights import experts, stored_weights
from ..weights.linear import groups_of, weight_of
from ..weights.quantization import can_quantize, quantize_rows, rotated
from ..weights.stored_weights import FORMATS, PARTS, Quantization, StoredLinear
from . import calibration, sensitivity

SHARD = "4GB"
LOSS = 0.0115  # nats a token that four bits may cost, as it is estimated: 3 % of perplexity are 0.03 (docs/quantize.md)
NARROW = (torch.bfloat16, torch.float16)
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class Written(Struct, frozen=True, kw_only=True):
    """How many linears were quantised, how many of them to four bits and not to eight, and the bytes of all weights
    before and after."""

    linears: int
    four_bits: int
    bytes_before: int
    bytes_after: int


@torch.no_grad()
def quantize_files(
    folder: Path, tasks: tuple[str, ...], quantization: Quantization, texts: Sequence[Sequence[int]] = ()
) -> Written:
    """Replace the weights in ``folder`` (safetensors, config.json) by quantised ones; those of four bits by ``texts``
    of token ids and what the model writes by itself. Links are broken, what they lead to stays as it is. Raises
    ``PackagingError`` for a model without linears that can be."""
    auto: Any = AutoModelForCausalLM
    if tasks == ("score",) or tasks == ("embeddings",):
        auto = AutoModelForSequenceClassification if tasks == ("score",) else AutoModel
    model = from_pretrained(auto, str(folder), EngineSettings(), torch.float32).eval().requires_grad_(False)
    body = getattr(model, model.base_model_prefix) if tasks == ("score",) else model
    prefix = next((f"{name}." for name, module in model.named_modules() if module is body and name), "")
    groups = [{f"{prefix}{path}": module for path, module in group.items()} for group in _linears(body)]
    chosen = {name: module for group in groups for name, module in group.items()}
    routed = {f"{prefix}{name}": weight for name, weight in _experts(body).items()}
    if not chosen:
        raise PackagingError(
            f"quantize: {quantization!r} is of no use: {type(model).__name__} has no linears to quantise"
        )
    for name, parameter in model.named_parameters():
        _check_finite(name, parameter)
    tensors = _other_tensors(model, {*routed, *(f"{name}.weight" for name in chosen)})
    for name, weight in routed.items():
        values, scale = quantize_rows(rotated(weight.detach().flatten(0, 1)))
        tensors |= {name: values.view_as(weight), f"{name}_scale": scale.view(*weight.shape[:-1], 1)}
    if quantization == "int4":
        grouped = [group for group in groups if all(weight_of(one).shape[1] % GROUP == 0 for one in group.values())]
        with _beside_others(model) as look:
            tensors |= _in_four_bits(model, grouped, texts, look)
    for name, module in chosen.items():
        if f"{name}.weight_packed" not in tensors:
            values, scale = quantize_rows(rotated(weight_of(module)))
            tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
    kinds = sorted({type(module).__name__ for module in chosen.values()})
    ignored = sorted(name for name, module in model.named_modules() if _is_linear(module) and name not in chosen)
    count = len(chosen) + len(routed)
    four_bits = sum(f"{name}.weight_packed" in tensors for name in chosen)
    widths = {name: weight_of(module).shape[1] for name, module in chosen.items()}
    widths |= {name: weight.shape[-1] for name, weight in routed.items()}
    del model, body, groups, routed
    before = _size(folder)
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD, metadata={"format": "pt"})
    _describe(folder, quantization, kinds, ignored, widths)
    for file in folder.glob("*.safetensors*"):
        file.chmod((folder / "config.json").stat().st_mode & 0o777)  # the writer makes them private
    stored_weights.load(auto, str(folder), torch.float32, "cpu")  # raises where it could not be served
    return Written(linears=count, four_bits=four_bits, bytes_before=before, bytes_after=_size(folder))


def _in_four_bits(
    model: Any, groups: list[dict[str, nn.Module]], texts: Sequence[Sequence[int]], look: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """The tensors that linears are stored as, of groups that share an input; without those that bear it worst, so that
    the rest cost no more than ``LOSS``."""
    texts = [*texts, *calibration.own_text(model)]
    names = {module: name for group in groups for name, module in group.items()}
    gradients = dict(zip(names, sensitivity.squared_gradients(model, list(names), texts), strict=True))
    made: list[dict[str, torch.Tensor]] = []
    costs: list[float] = []
    sizes: list[int] = []
    for group, products, inputs in calibration.inputs_of(model, [list(one.values()) for one in groups], texts):
        look()
        weights = [rotated(weight_of(module)) for module in group]
        rounded = calibration.quantised(weights, products, inputs)
        made.append({})
        costs.append(0.0)
        sizes.append(sum(weight.numel() for weight in weights))
        for module, weight, one in zip(group, weights, rounded, strict=True):
            parts = one.parts()
            made[-1] |= {f"{names[module]}.{part}": value for part, value in zip(PARTS, parts, strict=True)}
            costs[-1] += sensitivity.cost_of(StoredLinear(*parts).dense() - weight, products, gradients[module])
    eight = sensitivity.worst(costs, sizes, LOSS)
    return {name: value for i, tensors in enumerate(made) if i not in eight for name, value in tensors.items()}


@contextlib.contextmanager
def _beside_others(model: Any) -> Iterator[Callable[[], None]]:
    """Calls of ``model``, and of what is given, look whether others run on the processors. While they do, torch's
    threads do not spin: they would wait for each other for most of the time (docs/quantize.md)."""
    before = openmp.waiting.brief
    contention = Contention(lambda oversubscribed: openmp.waiting.set_brief(before or oversubscribed))
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda *call: contention.look())
    try:
        yield contention.look
    finally:
        hook.remove()
        openmp.waiting.set_brief(before)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _linears(body: nn.Module) -> list[dict[str, nn.Module]]:
    """Those that an engine which quantises at load would, by name, in groups that share an input: not the head, gates,
    or what is read by others."""
    latent, _ = latent_attention.install(body)
    latent_attention.remove(body)
    found = []
    for _, paths, modules, is_head in groups_of(body):
        whole = torch.empty(sum(weight_of(m).shape[0] for m in modules), weight_of(modules[0]).shape[1], device="cpu")
        if not is_head and paths[0] not in latent and can_quantize(whole) and not POOLER.search(f"{paths[0]}."):
            found.append(dict(zip(paths, modules, strict=True)))
    return found


def _experts(body: nn.Module) -> dict[str, torch.Tensor]:
    """Weights [experts, N, K] of those that an engine which quantises at load would quantise, by name."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in body.named_modules()
        if experts.is_known(module) and all(can_quantize(one) for one in experts.weights_of(module).values())
        for name in experts.PARAMETERS
    }


def _check_finite(name: str, weight: torch.Tensor) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise PackagingError(f"quantize: {name} holds values that are not finite")


def _other_tensors(model: nn.Module, stored: set[str]) -> dict[str, torch.Tensor]:
    """Those not in ``stored``, in the narrowest type that holds them exactly; of tied ones that which others are tied
    to."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in sorted(model.state_dict().items(), key=lambda item: item[0] in tied):
        if name in stored or (value.numel() and value.data_ptr() in seen):
            continue
        seen.add(value.data_ptr())
        tensors[name] = _narrowed(value).contiguous()
    return tensors


def _narrowed(value: torch.Tensor) -> torch.Tensor:
    if value.dtype == torch.float32:
        for dtype in NARROW:
            if torch.equal(value.to(dtype).float(), value):
                return value.to(dtype)
    return value


def _describe(
    folder: Path, quantization: Quantization, kinds: list[str], ignored: list[str], widths: dict[str, int]
) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    method, form = FORMATS[quantization]
    said: dict[str, Any] = {"quant_method": method, "format": form, "ignore": ignored}
    said["transform_config"] = stored_weights.transform_config(widths)
    if quantization == "int8":
        group = {"targets": kinds, "weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None}
        said |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    config["quantization_config"] = said
    file.unlink()
    file.write_text(json.dumps(config, indent=2) + "\n")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
