"""Models whose linears were quantised when they were logged: loaded as they are stored, never dequantised as a whole.

::

    model/config.json         quantization_config: how
    model/*.safetensors       every other tensor as it was, and for each linear

    int8    <linear>.weight         int8 [N, K]
            <linear>.weight_scale   float32 [N, 1]
            <linear>.weight_inputs  float32 [K], or none   weight = values * scale * inputs
    int4    <linear>.weight_packed  uint8 [N, K / 2]       byte j: value 2 j in its low half, 2 j + 1 in its high half
            <linear>.weight_scale   float16 [N, K / 32]
            <linear>.weight_zero    uint8 [N, K / 32]
            <linear>.weight_inputs  float32 [K]            weight = (values - zero) * scale * inputs

int8 without factors is the format "int-quantized" of compressed-tensors (used by llm-compressor, vLLM and
transformers): github.com/neuralmagic/compressed-tensors. The others are this package's own; int4's linears whose K is
not a multiple of 32 are in int8. ``weight_writer.py`` writes all of them.

Published checkpoints in other formats (published.py) are read into the same form: four bits in groups of any size and
without factors, or float8 with a scale a row.

Linears that quantization_config names in ``transform_config``, also of compressed-tensors, are stored multiplied by a
Hadamard matrix (quantization.py). Models of earlier versions have none. The factors ``inputs`` of int8 are of plain
inputs (input_factors.py), those of int4 of rotated ones. The output head, in floats, may have factors too, for its
quantisation at load.

A linear of such a model is a plain ``nn.Linear`` without a weight and with ``stored``, from which ``linear.install``
packs. Until then, while the model's own code runs on a few tokens, its weight is dequantised for each call."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from ...interface.errors import PackagingError, reason, shown
from ...interface.settings import EngineSettings
from ..native.library import GROUP_SIZE
from . import published
from .config_bounds import in_proportion
from .quantization import hadamard_order, rotated

logger = logging.getLogger(__name__)

Quantization = Literal["int8", "int4", "fp8"]
# quant_method and format of quantization_config
FORMATS: dict[Quantization, tuple[str, str]] = {
    "int8": ("compressed-tensors", "int-quantized"),
    "int4": ("mlflow-llm", "int4-groups-of-32"),
}
WITH_FACTORS = ("mlflow-llm", "int8-with-input-factors")  # of int8 with weight_inputs, which others would ignore
PARTS = ("weight_packed", "weight_scale", "weight_zero", "weight_inputs")
STORED = "stored"  # the attribute of a linear
FACTORS = "input_factors"  # the attribute of a linear
STORED_EXPERTS = "stored_experts"  # the attribute of a layer's experts
MAX_CACHED_BYTES = (
    1 << 30
)  # bytes of weights that are kept as floats while the model's own code runs, for it runs several times


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """Weights [N, K] as they are in the file. int8 and float8: ``values`` [N, K], ``scale`` [N, 1], ``zero`` None.
    Without ``inputs`` these factors are 1."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    is_rotated: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1] * (1 if self.zero is None else 2))

    @property
    def is_published(self) -> bool:
        """Whether others quantised the weights, so that linears beside them stay as they are."""
        return self.values.dtype == torch.float8_e4m3fn or (self.zero is not None and self.inputs is None)

    def unpacked(self) -> torch.Tensor:
        """Return the values [N, K]: int8, or for 4 bits uint8 in 0..15."""
        if self.zero is None:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), -1).flatten(1)

    def dense(self, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
        """Dequantise to [N, K] of ``dtype``."""
        values, scale = self.unpacked().to(device).float(), self.scale.to(device).float()
        if self.zero is None:
            weight = rotated(values * scale) if self.is_rotated else values * scale
            return (weight if self.inputs is None else weight * self.inputs.to(device)).to(dtype)
        grouped = values.view(len(values), scale.shape[1], -1)
        weight = ((grouped - self.zero.to(device).float()[..., None]) * scale[..., None]).flatten(1)
        weight = weight if self.inputs is None else weight * self.inputs.to(device)
        return (rotated(weight) if self.is_rotated else weight).to(dtype)


def concatenate(parts: list[StoredLinear]) -> StoredLinear:
    """Concatenate linears that read the same input. Raises ``PackagingError`` if they are stored differently."""
    if len(parts) == 1:
        return parts[0]
    inputs, is_rotated = parts[0].inputs, parts[0].is_rotated
    if any(one.is_rotated != is_rotated or (one.inputs is None) != (inputs is None) for one in parts) or any(
        one.inputs is not None and inputs is not None and not torch.equal(one.inputs, inputs) for one in parts
    ):
        raise PackagingError("linears that share an input are stored in different ways")
    zeros = [one.zero for one in parts if one.zero is not None]
    values = torch.cat([one.values.view(torch.uint8) for one in parts]).view(parts[0].values.dtype)
    scale = torch.cat([one.scale for one in parts])
    return StoredLinear(values, scale, torch.cat(zeros) if zeros else None, inputs, is_rotated)


def stored_of(module: nn.Module) -> StoredLinear | None:
    """Return how a linear's weights are stored; None if they are floats."""
    found: StoredLinear | None = module.__dict__.get(STORED)
    return found


def factors_of(module: nn.Module) -> torch.Tensor | None:
    """Return the factors of the inputs of a linear in floats for its quantisation (input_factors.py), if it has any."""
    found: torch.Tensor | None = module.__dict__.get(FACTORS)
    return found


def stored_experts_of(module: nn.Module) -> dict[str, StoredLinear]:
    """Return the stored weights of experts by parameter name, with the experts stacked; without those that are
    floats."""
    found: dict[str, StoredLinear] = module.__dict__.get(STORED_EXPERTS, {})
    return found


def quantization_of(folder: str | Path) -> Quantization | None:
    """Return how the linears of the model in ``folder`` are stored; None for floats. Raises ``PackagingError`` for a
    format that is not known."""
    said = _said_in(folder)
    if not said:
        return None
    if (form := published.published_of(said)) is not None:
        return form.quantization
    own = (said.get("quant_method"), said.get("format")) if isinstance(said, dict) else None
    for quantization, expected in FORMATS.items():
        if own == expected:
            return quantization
    if own == WITH_FACTORS:
        return "int8"
    raise _unsupported_format("quantization_config", said)


def _said_in(folder: str | Path) -> Any:
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # building the model reports it
    return config.get("quantization_config") if isinstance(config, dict) else None


def _unsupported_format(name: str, said: Any) -> PackagingError:
    return PackagingError(
        f"config.json: {name}: {shown(said)} is not allowed; expected weights in floats, as log_model(quantize=…)"
        " stores them, or in a published format (docs/gpu.md); engine vllm runs others"
    )


def transform_config(widths: Mapping[str, int]) -> dict[str, Any]:
    """Describe, in the format of compressed-tensors, that the linears in ``widths`` (inputs by name) are rotated."""
    names: dict[int, list[str]] = {}
    for name, width in sorted(widths.items()):
        names.setdefault(hadamard_order(width), []).append(name)
    groups = {}
    for order, targets in sorted(names.items()):
        apply = [
            {"targets": targets, "location": "input"},
            {"targets": targets, "location": "weight_input", "inverse": True},
        ]
        groups[f"hadamard_{order}"] = {"type": "hadamard", "head_dim": order, "apply": apply}
    return {"config_groups": groups}


def _rotated_in(folder: Path) -> dict[str, int]:
    """Return the order of the Hadamard matrix of each linear that is stored rotated. Raises ``PackagingError``."""
    said = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    config = said.get("transform_config") if isinstance(said, dict) else None
    if config is None:
        return {}
    try:
        groups = list(config["config_groups"].values())
        found = {name: group["head_dim"] for group in groups for name in group["apply"][0]["targets"]}
        if config == transform_config(found):  # the order of a power of two is itself
            return found
    except (AttributeError, KeyError, IndexError, TypeError):
        pass
    raise _unsupported_format("quantization_config.transform_config", config)


def refuse_other_weights(settings: EngineSettings, stored: str | None) -> None:
    """Raise ``PackagingError`` if ``settings`` ask for weights other than those ``stored``, None for floats."""
    if stored is None and settings.quantization == "int4":
        raise PackagingError(
            "quantization: 'int4' is not allowed; expected 'none' or 'int8': 4-bit weights are made when a model is"
            " logged (quantize='int4')"
        )
    if stored not in (None, settings.quantization):
        raise PackagingError(
            f"quantization: {settings.quantization!r} is not allowed; expected {stored!r}: so the model's weights"
            " are stored, in place of the original ones"
        )


def adopted(settings: EngineSettings, folder: str | Path) -> EngineSettings:
    """Return ``settings`` with the quantization of the model in ``folder`` if it has one, else one that is made at
    load. Raises ``PackagingError``."""
    found = quantization_of(folder) or ("int8" if settings.quantization == "int4" else settings.quantization)
    return msgspec.structs.replace(settings, quantization=found)


def load(auto: Any, folder: str, dtype: torch.dtype, device: Any) -> Any:
    """Load the model in ``folder`` as class ``auto`` in ``dtype``, with its linears as they are stored. Raises
    ``PackagingError`` if the files are not a complete model."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with in_proportion(folder), _without_weights():
            model = auto.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
        model.eval().requires_grad_(False)
        form = published.published_of(_said_in(folder))
        if form is None:
            _fill(model, Path(folder), dtype)
        else:
            _fill_published(model, Path(folder), dtype, form)
        model.tie_weights()
    except (PackagingError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from transformers or safetensors
        raise PackagingError(f"the model cannot be loaded: {type(error).__name__}: {reason(error)}") from error
    if missing := sorted(name for name, value in model.named_parameters() if value.is_meta):
        raise PackagingError(f"the weights are incomplete: they lack {len(missing)} tensors: {', '.join(missing[:5])}")
    for _, buffer in list(model.named_buffers()):
        assert not buffer.is_meta, "buffers are made with the model"
    model.to(device)
    _make_runnable(model)
    return model


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Put parameters that this thread's modules register on the meta device; buffers are made as usual."""
    me = threading.get_ident()

    def to_meta(module: Any, name: str, parameter: Any) -> Any:
        if threading.get_ident() != me or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def _fill(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Set the model's tensors from the files, by name. Parts of a linear may be in different files."""
    modules, orders = dict(model.named_modules()), _rotated_in(folder)
    if not orders:
        logger.warning(
            "the quantised weights are not rotated, as stored by earlier releases; logging the model again makes it"
            " more accurate"
        )
    with contextlib.ExitStack() as stack:
        paths = sorted(folder.glob("*.safetensors"))
        files = [stack.enter_context(safe_open(str(file), framework="pt")) for file in paths]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in places:
            path, _, own = name.rpartition(".")
            if own == PARTS[3] and path in modules and f"{path}.{PARTS[0]}" not in places:
                _set_factors(modules[path], name, places[name].get_tensor(name))
        for name in sorted(places):
            path, _, own = name.rpartition(".")
            module = modules.get(path)
            if module is None or own in PARTS[1:] or name.removesuffix("_scale") in places.keys() - {name}:
                continue
            value = places[name].get_tensor(name)
            more = [f"{path}.{part}" for part in PARTS[1:]] if own == PARTS[0] else [f"{name}_scale"]
            if own == PARTS[0] or more[0] in places:
                parts = (value, *(places[one].get_tensor(one) for one in more if one in places))
                _store(module, name, parts, orders.get(name.removesuffix(".weight").removesuffix(f".{PARTS[0]}")))
            else:
                _set(module, name, value.to(dtype) if value.is_floating_point() else value)


def _fill_published(model: nn.Module, folder: Path, dtype: torch.dtype, form: published.Published) -> None:
    """Set the model's tensors from files in a published format. Raises ``PackagingError``."""
    modules = dict(model.named_modules())
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(str(file), framework="pt")) for file in sorted(folder.glob("*.safetensors"))
        ]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118

        def get(name: str) -> torch.Tensor | None:
            return places[name].get_tensor(name) if name in places else None

        read = set()
        for path in published.linears_in(set(places), form):
            module = modules.get(path)
            if not isinstance(module, nn.Linear) or module._parameters.get("weight") is None:
                raise PackagingError(f"{path} is quantised in the weights; expected only linears of the model to be")
            rows, columns = module.weight.shape
            module.__dict__[STORED] = StoredLinear(*published.read(form, path, (rows, columns), get))
            del module._parameters["weight"]
            read |= {f"{path}.{part}" for part in published.PARTS | {"weight"}}
        for name in sorted(places.keys() - read):
            module = modules.get(name.rpartition(".")[0])
            if module is not None:
                value = places[name].get_tensor(name)
                _set(module, name, value.to(dtype) if value.is_floating_point() else value)


def _set_factors(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a linear in int8, or one that is quantised at load, the factors of its inputs."""
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(module, nn.Linear | Conv1D):
        raise PackagingError(f"{name} is stored; expected factors of a linear, not of {type(module).__name__}")
    width = weight.shape[0 if isinstance(module, Conv1D) else 1]
    if value.dtype != torch.float32 or tuple(value.shape) != (width,):
        raise PackagingError(
            f"{name}: {value.dtype} of shape {tuple(value.shape)} is not allowed; config.json gives torch.float32 of"
            f" {(width,)}"
        )
    if not bool((torch.isfinite(value) & (value > 0)).all()):
        raise PackagingError(f"{name} holds factors that are not allowed; expected finite ones above 0")
    module.__dict__[FACTORS] = value


def _store(module: nn.Module, name: str, parts: tuple[torch.Tensor, ...], order: int | None) -> None:
    own = "weight" if name.endswith(PARTS[0]) else name.rpartition(".")[2]
    expected = module._parameters.get(own)
    if expected is None:
        return
    if expected.dim() < 2 or (own == "weight" and not isinstance(module, nn.Linear | Conv1D)):
        raise PackagingError(
            f"{name} is stored with a scale; expected weights of a linear, not of {type(module).__name__}"
        )
    shape = tuple(expected.shape[::-1] if isinstance(module, Conv1D) else expected.shape)
    wanted: list[tuple[torch.dtype, tuple[int, ...]]] = [(torch.int8, shape), (torch.float32, (*shape[:-1], 1))]
    if name.endswith(PARTS[0]):
        rows, columns = shape
        groups = (rows, columns // GROUP_SIZE)
        wanted = [(torch.uint8, (rows, columns // 2)), (torch.float16, groups), (torch.uint8, groups)]
        wanted.append((torch.float32, (columns,)))
        if len(parts) != len(wanted) or columns % GROUP_SIZE:
            raise PackagingError(f"{name}: its scales, zero points or factors are missing")
    for value, (dtype, form) in zip(parts, wanted, strict=True):
        if value.dtype != dtype or tuple(value.shape) != form:
            raise PackagingError(
                f"{name}: {value.dtype} of shape {tuple(value.shape)} is not allowed; config.json gives"
                f" {dtype} of {form}"
            )
    if order is not None and order != hadamard_order(shape[-1]):
        raise PackagingError(f"{name}: head_dim {order} is not allowed; expected {hadamard_order(shape[-1])}")
    if own != "weight":
        found = StoredLinear(parts[0].flatten(0, 1), parts[1].flatten(0, 1), is_rotated=order is not None)
        module.__dict__.setdefault(STORED_EXPERTS, {})[own] = found
        del module._parameters[own]
        return
    found, factors = StoredLinear(*parts), factors_of(module)
    if factors is not None:
        if order is None:
            raise PackagingError(f"{name} has factors of its inputs; expected only rotated weights to have them")
        found = replace(found, inputs=factors)
    module.__dict__[STORED] = replace(found, is_rotated=order is not None)
    del module._parameters["weight"]


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    own = name.rpartition(".")[2]
    place: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    expected = place.get(own)
    if expected is None:
        return
    _check_shape(name, tuple(value.shape), tuple(expected.shape))
    if value.is_floating_point() != expected.is_floating_point():
        raise PackagingError(f"{name} is {value.dtype} in the weights; expected {expected.dtype}")
    place[own] = nn.Parameter(value, requires_grad=False) if place is module._parameters else value


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise PackagingError(f"{name} has shape {found} in the weights but config.json gives {expected}")


def _make_runnable(model: nn.Module) -> None:
    """Dequantise stored weights for one call; cache them permanently if they are small."""
    linears = [(m, "weight", found) for m in model.modules() if (found := stored_of(m)) is not None]
    linears += [(m, name, found) for m in model.modules() for name, found in stored_experts_of(m).items()]
    keep = 4 * sum(found.values.numel() for *_, found in linears) <= MAX_CACHED_BYTES
    for module, name, found in linears:
        _run_by_calls(module, name, found, keep=keep)


def _run_by_calls(module: nn.Module, name: str, found: StoredLinear, *, keep: bool) -> None:
    def make(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if name not in module.__dict__:
            dense = found.dense(inputs[0].dtype, inputs[0].device)
            if name != "weight":
                dense = dense.unflatten(0, (int(getattr(module, "num_experts", 1)), -1))
            module.__dict__[name] = dense.t().contiguous() if isinstance(module, Conv1D) else dense

    def drop(module: nn.Module, inputs: Any, output: Any) -> None:
        del module.__dict__[name]

    module.register_forward_pre_hook(make)
    if not keep:
        module.register_forward_hook(drop)
