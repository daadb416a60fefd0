"""Quantise the linears of a model's files into the format of ``stored_weights.py``. Done once, when a model is
logged."""

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
from ..models.resolved_settings import ResolvedSettings
from ..native.library import GROUP_SIZE
from ..weights import experts, input_factors, stored_weights
from ..weights.linear import groups_of, weight_of
from ..weights.quantization import can_quantize, divided, quantize_rows, rotated
from ..weights.stored_weights import FORMATS, PARTS, WITH_FACTORS, Quantization, StoredLinear, factors_of
from . import calibration, sensitivity

MAX_SHARD_SIZE = "4GB"
MAX_LOSS_NATS = (
    0.0115  # nats per token that 4 bits may cost by the estimate; 3 % of perplexity are 0.03 (docs/quantize.md)
)
NARROW_DTYPES = (torch.bfloat16, torch.float16)
WEIGHT_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATION_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class Written(Struct, frozen=True, kw_only=True):
    """The result: the number of quantised linears, how many of them have 4 instead of 8 bits, and the bytes of all
    weights before and after."""

    linears: int
    four_bits: int
    bytes_before: int
    bytes_after: int


@torch.no_grad()
def quantize_files(
    folder: Path, tasks: tuple[str, ...], quantization: Quantization, texts: Sequence[Sequence[int]] = ()
) -> Written:
    """Replace the weights in ``folder`` (safetensors, config.json) by quantised ones, calibrated by ``texts`` of token
    ids and by text that the model generates. Without ``texts``, weights of 8 bits are rounded each by itself.

    Links are replaced, their targets stay unchanged. Raises ``PackagingError`` for a model without linears to
    quantise."""
    auto: Any = AutoModelForCausalLM
    if tasks == ("score",) or tasks == ("embeddings",):
        auto = AutoModelForSequenceClassification if tasks == ("score",) else AutoModel
    model = (
        from_pretrained(auto, str(folder), ResolvedSettings.of(EngineSettings(dtype="float32")))
        .eval()
        .requires_grad_(False)
    )
    body = getattr(model, model.base_model_prefix) if tasks == ("score",) else model
    prefix = next((f"{name}." for name, module in model.named_modules() if module is body and name), "")
    groups = [{f"{prefix}{path}": module for path, module in group.items()} for group in _linears(body)]
    chosen = {name: module for group in groups for name, module in group.items()}
    routed = {f"{prefix}{name}": weight for name, weight in _experts(body).items()}
    if not chosen:
        raise PackagingError(
            f"quantize: {quantization!r} is not allowed; expected None: {type(model).__name__} has no linear layers to"
            " quantise"
        )
    for name, parameter in model.named_parameters():
        _check_finite(name, parameter)
    if quantization == "int8" and auto is AutoModelForCausalLM:
        input_factors.measure(model, texts)
    tensors = _other_tensors(model, {*routed, *(f"{name}.weight" for name in chosen)})
    for name, weight in routed.items():
        values, scale = quantize_rows(rotated(weight.detach().flatten(0, 1)))
        tensors |= {name: values.view_as(weight), f"{name}_scale": scale.view(*weight.shape[:-1], 1)}
    if quantization == "int4":
        grouped = [
            group for group in groups if all(weight_of(one).shape[1] % GROUP_SIZE == 0 for one in group.values())
        ]
        with _adaptive_waiting(model) as look:
            tensors |= _in_four_bits(model, grouped, texts, look)
    elif texts:
        with _adaptive_waiting(model) as look:
            tensors |= _in_eight_bits(model, groups, texts, look)
    for name, module in chosen.items():
        if not tensors.keys() & {f"{name}.weight_packed", f"{name}.weight_scale"}:
            values, scale = quantize_rows(_rotated(module))
            tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
    factors = _factors(model, set(chosen))
    tensors |= factors
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
    save_torch_state_dict(tensors, folder, max_shard_size=MAX_SHARD_SIZE, metadata={"format": "pt"})
    form = WITH_FACTORS if factors else FORMATS[quantization]
    _describe(folder, form, kinds, ignored, widths)
    for file in folder.glob("*.safetensors*"):
        file.chmod((folder / "config.json").stat().st_mode & 0o777)  # the writer gives them private permissions
    stored_weights.load(auto, str(folder), torch.float32, "cpu")  # raises if it could not be served
    return Written(linears=count, four_bits=four_bits, bytes_before=before, bytes_after=_size(folder))


def _in_four_bits(
    model: Any, groups: list[dict[str, nn.Module]], texts: Sequence[Sequence[int]], look: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return the tensors of linears in 4 bits, by groups that share an input, without the most sensitive ones, so that
    the others cost at most ``MAX_LOSS_NATS``."""
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
    eight = sensitivity.worst(costs, sizes, MAX_LOSS_NATS)
    return {name: value for i, tensors in enumerate(made) if i not in eight for name, value in tensors.items()}


def _in_eight_bits(
    model: Any, groups: list[dict[str, nn.Module]], texts: Sequence[Sequence[int]], look: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return the tensors of linears in 8 bits, by groups that share an input."""
    names = {module: name for group in groups for name, module in group.items()}
    texts = [*texts, *calibration.own_text(model)]
    tensors: dict[str, torch.Tensor] = {}
    grouped = [list(one.values()) for one in groups]
    for group, products, _ in calibration.inputs_of(model, grouped, texts, alike=True):
        look()
        for module in group:
            values, scale = calibration.rounded_to_bytes(_rotated(module), products)
            tensors |= {f"{names[module]}.weight": values, f"{names[module]}.weight_scale": scale}
    return tensors


def _rotated(module: nn.Module) -> torch.Tensor:
    """Return the weight [N, K] of a linear as int8 rounds it."""
    return rotated(divided(weight_of(module), factors_of(module)))


def _factors(model: Any, chosen: set[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of the factors of ``chosen`` linears, and of the output head, which is quantised at load."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {
        f"{name}.{PARTS[3]}": factors_of(module)
        for name, module in model.named_modules()
        if name in chosen or module is head
    }
    return {name: factors.clone() for name, factors in found.items() if factors is not None}


@contextlib.contextmanager
def _adaptive_waiting(model: Any) -> Iterator[Callable[[], None]]:
    """Check at each call of ``model``, and of the function yielded, whether other processes use the CPUs. While they
    do, torch's threads do not spin, since they would mostly wait for each other (docs/quantize.md)."""
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
    """Return the linears that an engine which quantises at load would quantise, by name, in groups that share an input:
    without the head, gates, and those that other modules read."""
    latent, _ = latent_attention.install(body)
    latent_attention.remove(body)
    found = []
    for _, paths, modules, is_head in groups_of(body):
        whole = torch.empty(sum(weight_of(m).shape[0] for m in modules), weight_of(modules[0]).shape[1], device="cpu")
        if not is_head and paths[0] not in latent and can_quantize(whole) and not POOLER.search(f"{paths[0]}."):
            found.append(dict(zip(paths, modules, strict=True)))
    return found


def _experts(body: nn.Module) -> dict[str, torch.Tensor]:
    """Return weights [experts, N, K] of the experts that an engine which quantises at load would quantise, by name."""
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
    """Return the tensors not in ``stored``, in the narrowest dtype that represents them exactly; of tied weights only
    the owner's."""
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
        for dtype in NARROW_DTYPES:
            if torch.equal(value.to(dtype).float(), value):
                return value.to(dtype)
    return value


def _describe(folder: Path, of: tuple[str, str], kinds: list[str], ignored: list[str], widths: dict[str, int]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    method, form = of
    said: dict[str, Any] = {"quant_method": method, "format": form, "ignore": ignored}
    said["transform_config"] = stored_weights.transform_config(widths)
    if of != FORMATS["int4"]:
        group = {
            "targets": kinds,
            "weights": WEIGHT_SCHEME,
            "input_activations": ACTIVATION_SCHEME,
            "output_activations": None,
        }
        said |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    config["quantization_config"] = said
    file.unlink()
    file.write_text(json.dumps(config, indent=2) + "\n")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
