"""The model's linears, replaced in place by ours, with packed weights, fused siblings and LoRA.

Siblings that read the same input (q, k, v; gate, up) become one GEMM. The first one called computes all of it, and the
others take their parts of the rows::

    x [T, K] -- one GEMM --> [T, Nq + Nk + Nv] -- split --> q [T, Nq], k [T, Nk], v [T, Nv]   (views)

A sibling takes its part, once, only if it is called with the very tensor object that was multiplied. Otherwise it
multiplies again, so a module that feeds its siblings different tensors is slower but never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...interface.settings import EngineSettings
from ...system import load_steps
from ..native.library import GROUP_SIZE, LANES
from ..native.weight import BF16, F32, ROTATED, NativeWeight, can_pack
from . import experts, fp8_inputs, int4
from .experts import EngineExperts
from .forward_context import ContextHolder
from .fp8 import Fp8Weight
from .fp8 import can_quantize as fits_fp8
from .int4 import Int4Weight
from .quantization import Int8Weight, can_quantize
from .stored_weights import StoredLinear, concatenate, factors_of, stored_of
from .weight_layouts import PackedWeight, PlainWeight, pack_float

SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)


class LinearGroup:
    """One GEMM and the linears that share it. ``bounds[i]`` are the output columns [start, end) of member ``i``.

    ``key`` names the group for the LoRA plan: the members' module names.
    """

    __slots__ = ("_all_taken", "_input", "_parts", "_taken", "bounds", "holder", "key", "packed", "sizes")

    def __init__(self, key: tuple[str, ...], packed: PackedWeight, sizes: Sequence[int], holder: ContextHolder) -> None:
        self.key = key
        self.packed = packed
        self.sizes = list(sizes)
        self.holder = holder
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        self.bounds = [(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._taken = 0
        self._all_taken = (1 << len(self.sizes)) - 1

    def part(self, member: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one member for ``x`` [..., K]."""
        if len(self.sizes) == 1:
            return self.compute(x)
        bit = 1 << member
        if x is not self._input or self._taken & bit:
            self._parts = self.compute(x).split(self.sizes, -1)
            self._input, self._taken = x, 0
        y = self._parts[member]
        self._taken |= bit
        if self._taken == self._all_taken:
            self._input, self._parts = None, ()  # free the activations before the next layer allocates
        return y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        flat = fp8_inputs.passed_on(x, x.reshape(-1, self.packed.in_features))
        y = self.packed.matmul(flat)
        context = self.holder.context
        if context is not None and context.lora is not None:
            context.lora.add_to(self.key, flat, y)
        return y.view(*x.shape[:-1], self.packed.out_features)


class EngineLinear(nn.Module):
    """A module that takes the place of an ``nn.Linear`` or GPT-2's ``Conv1D``. ``weight`` [out, in] is rebuilt at each
    access. ``is_tied``: it is the output head, and its weights were the input embedding."""

    def __init__(self, name: str, group: LinearGroup, member: int, *, is_tied: bool = False) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.name = name
        self.group = group
        self.member = member
        self.in_features = group.packed.in_features
        self.out_features = group.sizes[member]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.part(self.member, x)

    @property
    def weight(self) -> torch.Tensor:
        start, end = self.group.bounds[self.member]
        return self.group.packed.dense()[start:end]

    @property
    def bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self.group.packed, "bias", None)
        start, end = self.group.bounds[self.member]
        return None if bias is None else bias[start:end]

    def extra_repr(self) -> str:
        packed = type(self.group.packed).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, {packed}, of {len(self.group.sizes)}"


@dataclass(frozen=True, slots=True)
class LinearSet:
    """All engine linears and experts of a model by module name. ``head`` is the output head's name, None if it has
    none."""

    linears: dict[str, EngineLinear] = field(default_factory=dict)
    head: str | None = None
    experts: dict[str, EngineExperts] = field(default_factory=dict)

    @property
    def packed(self) -> dict[str, PackedWeight]:
        """The packed weights by their sources: module names joined by +; for experts, the parameter's name."""
        groups = {id(one.group): one.group for one in self.linears.values()}.values()
        found = {"+".join(group.key): group.packed for group in groups}
        for path, module in self.experts.items():
            found |= {f"{path}.{name}": packed for name, packed in module.packed.items()}
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) by module name."""
        return {name: (linear.out_features, linear.in_features) for name, linear in self.linears.items()}


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight [out, in] of an ``nn.Linear`` or a ``Conv1D`` (which stores [in, out]). If it is not stored as
    floats, the result is a meta tensor that has only the shape."""
    if (stored := stored_of(module)) is not None:
        return torch.empty(stored.shape, device="meta")
    weight: torch.Tensor = module.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def replaceable(module: nn.Module) -> bool:
    """Return whether a module is of exactly these classes; a parent may use a subclass in other ways than calling
    it."""
    return type(module) in (nn.Linear, Conv1D)


def _siblings(parent: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the parent's replaceable children, grouped by the GEMM that they can share."""
    children = {name: child for name, child in parent.named_children() if replaceable(child)}
    groups: list[tuple[str, ...]] = []
    for names in SIBLINGS:
        if all(name in children for name in names):
            weights = [weight_of(children[name]) for name in names]
            if len({(w.shape[1], w.dtype, w.device) for w in weights}) == 1:
                groups.append(names)
                for name in names:
                    del children[name]
    return groups + [(name,) for name in children]


def _joined_bias(modules: Sequence[nn.Module], sizes: Sequence[int]) -> torch.Tensor | None:
    biases: list[Any] = [module.bias for module in modules]
    if all(bias is None for bias in biases):
        return None
    like = next(bias for bias in biases if bias is not None)
    return torch.cat(
        [like.new_zeros(size) if bias is None else bias.detach() for bias, size in zip(biases, sizes, strict=True)]
    )


def _pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: EngineSettings,
    is_head: bool,
    inputs: torch.Tensor | None = None,
) -> PackedWeight:
    """Pack a weight as the settings say, in int8 with the factors ``inputs`` (input_factors.py).

    With native kernels the head is in int8 like the other linears (quantization.py gives its accuracy). A packed tied
    head is a second copy of the embedding, but faster: blocked by oneDNN, the head of SmolLM2-135M takes 2.6 / 3.5 /
    9.2 ms at 1 / 8 / 32 rows instead of 9.2 / 16 / 24."""
    if settings.quantization == "fp8":
        return Fp8Weight(weight, bias) if fits_fp8(weight) and not is_head else pack_float(weight, bias)
    int8 = settings.quantization != "none" and can_quantize(weight)  # with int4, linears not stored in four bits
    if settings.kernels == "auto" and can_pack(weight):
        if int8:
            return NativeWeight(weight, bias, ROTATED, inputs)
        return NativeWeight(weight, bias, BF16 if settings.dtype == "bfloat16" else F32)
    return Int8Weight(weight, bias, inputs=inputs) if int8 and not is_head else pack_float(weight, bias)


def _pack_stored(stored: StoredLinear, bias: torch.Tensor | None, settings: EngineSettings, like: Any) -> PackedWeight:
    """Pack weights that were quantised before.

    int8 weights equal, to the bit, what ``_pack`` makes from the original weights. Our own kernels multiply four-bit
    weights as they are; elsewhere they are converted to floats."""
    native = settings.kernels == "auto" and can_pack(like) and stored.shape[1] % LANES == 0
    if stored.is_published:
        return _pack_published(stored, bias, settings, like, native=native)
    if stored.zero is not None and stored.inputs is not None:
        if native:
            return NativeWeight.of_int4(
                stored.unpacked(), stored.scale, stored.zero, stored.inputs, bias, is_rotated=stored.is_rotated
            )
        return pack_float(stored.dense(like.dtype, like.device), bias)
    if native:
        return NativeWeight.of_int8(
            stored.values, stored.scale, bias, is_rotated=stored.is_rotated, inputs=stored.inputs
        )
    if can_quantize(stored.values.to(like.device)):
        values, scale = stored.values.to(like.device), stored.scale.to(like.device)
        return Int8Weight.of(values, scale, bias, like.dtype, is_rotated=stored.is_rotated, inputs=stored.inputs)
    return pack_float(stored.dense(like.dtype, like.device), bias)


def _pack_published(
    stored: StoredLinear, bias: torch.Tensor | None, settings: EngineSettings, like: Any, *, native: bool
) -> PackedWeight:
    """Pack weights that others quantised: as they are where kernels take them, else as floats."""
    columns = stored.shape[1]
    if stored.zero is None:
        values = stored.values.to(like.device)
        if fits_fp8(values):
            return Fp8Weight.of(values, stored.scale.to(like.device), bias, like.dtype)
    elif not (why := int4.why_not(like.device, like.dtype, columns // stored.zero.shape[1])):
        return Int4Weight(stored.unpacked(), stored.scale, stored.zero, bias, like.dtype, like.device)
    elif native and columns // stored.zero.shape[1] % GROUP_SIZE == 0:
        scale = stored.scale.half()
        if torch.equal(scale.float(), stored.scale.float()):
            repeats = columns // GROUP_SIZE // stored.zero.shape[1]
            scale, zero = (one.repeat_interleave(repeats, 1) for one in (scale, stored.zero))
            return NativeWeight.of_int4(stored.unpacked(), scale, zero, torch.ones(columns), bias)
    elif like.device.type == "cuda":
        int4.report(why)
    floats = msgspec.structs.replace(settings, quantization="none")
    return _pack(stored.dense(like.dtype, like.device), bias, floats, False)


OF_TORCH = EngineSettings(kernels="torch")
Pack = Callable[[tuple[str, ...], torch.Tensor, torch.Tensor | None, bool], PackedWeight]


def install(
    model: nn.Module,
    holder: ContextHolder,
    settings: EngineSettings,
    pack: Pack | None = None,
    plain: Collection[str] = (),
) -> LinearSet:
    """Replace every linear of ``model`` in place, freeing each weight once it is packed. The model can then only infer.

    Linears named in ``plain`` stay floats in torch's layout, because other code reads their weights. Experts are
    replaced if our kernels take them or they are in int8; otherwise they stay as they are.

    ``pack(names, weight, bias, is_head)`` replaces the packing, for example for linears that were packed before."""
    found: dict[str, EngineLinear] = {}
    head_name: str | None = None
    like = next(model.parameters(), None)
    total, done = sum(_num_bytes(module) for module in model.modules() if replaceable(module)), 0
    published = any((stored := stored_of(module)) is not None and stored.is_published for module in model.modules())
    others = msgspec.structs.replace(settings, quantization="none") if published else settings
    step = "packing" if settings.quantization == "none" else "quantising"
    for parent, paths, modules, is_head in groups_of(model):
        if pack is None:
            load_steps.report(step, done, total)
            done += sum(map(_num_bytes, modules))
        weights = [weight_of(module) for module in modules]
        sizes = [weight.shape[0] for weight in weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = _joined_bias(modules, sizes)
        kept = [stored for module in modules if (stored := stored_of(module)) is not None]
        packed: PackedWeight
        if pack is not None and paths[0] not in plain:
            packed = pack(paths, weight, bias, is_head)
        elif paths[0] in plain:
            packed = PlainWeight(
                concatenate(kept).dense(like.dtype, like.device) if kept and like is not None else weight, bias
            )
        elif kept:
            packed = _pack_stored(concatenate(kept), bias, settings, like)
        else:
            packed = _pack(weight, bias, others, is_head, factors_of(modules[0]))
        group = LinearGroup(paths, packed, sizes, holder)
        is_tied = is_head and stored_of(modules[0]) is None and modules[0].weight is _embedding(model)
        if is_head:
            head_name = paths[0]
        for member, path in enumerate(paths):
            found[path] = EngineLinear(path, group, member, is_tied=is_tied)
            setattr(parent, path.rpartition(".")[2], found[path])
    return LinearSet(linears=found, head=head_name, experts=_install_experts(model, others, pack, like))


def _embedding(model: Any) -> torch.Tensor | None:
    weight: torch.Tensor | None = getattr(model.get_input_embeddings(), "weight", None)
    return weight


def _num_bytes(module: nn.Module) -> int:
    weight = weight_of(module)
    return weight.numel() * weight.element_size()


def _install_experts(
    model: nn.Module, settings: EngineSettings, pack: Pack | None, like: torch.Tensor | None
) -> dict[str, EngineExperts]:
    found: dict[str, EngineExperts] = {}
    for path, module in list(model.named_modules()):
        if not experts.is_known(module):
            continue
        native = settings.kernels == "auto" and experts.fits_natively(module, like)
        packed: dict[str, PackedWeight | None] = {}
        for name, weight in experts.weights_of(module).items():
            if pack is not None:
                packed[name] = pack((f"{path}.{name}",), torch.empty(weight.shape, device="meta"), None, False)
            else:
                packed[name] = _pack_experts(weight, settings, like, native=native)
        whole = {name: one for name, one in packed.items() if one is not None}
        if len(whole) == len(packed):
            found[path] = EngineExperts(module, whole)
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, found[path])
    return found


def _pack_experts(
    weight: torch.Tensor | StoredLinear, settings: EngineSettings, like: Any, *, native: bool
) -> PackedWeight | None:
    """Pack experts; None if they stay as they are, since torch multiplies all experts of a layer in one call."""
    if isinstance(weight, StoredLinear):
        if native or can_quantize(weight.values.to(like.device)):
            return _pack_stored(weight, None, settings if native else OF_TORCH, like)
        return PlainWeight(weight.dense(like.dtype, like.device), None)
    if native:
        return _pack(weight, None, settings, False)
    int8 = settings.quantization in ("int8", "int4") and weight.device.type == "cpu" and can_quantize(weight)
    return Int8Weight(weight, None) if int8 else None


def groups_of(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Module], bool]]:
    """Yield the linears that share a GEMM: parent, paths, modules, and whether they are the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for prefix, parent in list(model.named_modules()):
        for names in _siblings(parent):
            modules = [getattr(parent, name) for name in names]
            paths = tuple(f"{prefix}.{name}" if prefix else name for name in names)
            yield parent, paths, modules, head is not None and modules[0] is head
