"""Checkpoints that others quantised: AWQ and GPTQ of four bits, compressed-tensors of four bits and of float8.

::

    a linear [N, K] in the file, groups of G inputs; eight values in an int32, the first in its lowest bits
    awq     qweight [K, N / 8]         qzeros [K / G, N / 8]             scales [K / G, N]     columns 0 2 4 6 1 3 5 7
    gptq    qweight [K / 8, N]         qzeros [K / G, N / 8], less one   scales [K / G, N]     g_idx [K]: their groups
            (checkpoint_format gptq_v2: not less one)
    packed  weight_packed [N, K / 8]   weight_zero_point [N / 8, K / G]  weight_scale [N, K / G]
            (values and zeros plus 8; without zeros they are 0)
    float8  weight float8 [N, K]                                         weight_scale [N, 1] or [1]

    weight = (value - zero) * scale

Formats: github.com/casper-hansen/AutoAWQ (version gemm), github.com/ModelCloud/GPTQModel,
github.com/neuralmagic/compressed-tensors (pack-quantized, float-quantized)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...interface.errors import PackagingError, shown

Get = Callable[[str], torch.Tensor | None]
Form = Literal["awq", "gptq", "packed", "float8"]
FIRST: dict[Form, str] = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "float8": "weight"}
PARTS = {"qweight", "qzeros", "scales", "g_idx"}  # all names of tensors that are read with the first
PARTS |= {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale"}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where columns 0 … 7 are in an int32
COMPRESSED: dict[str, Form] = {"pack-quantized": "packed", "float-quantized": "float8"}


@dataclass(frozen=True, slots=True)
class Published:
    """A format of quantised linears. ``group`` is the number of inputs that share a scale, -1 for all."""

    form: Form
    group: int = -1
    zero_offset: int = 0

    @property
    def quantization(self) -> Literal["int4", "fp8"]:
        return "fp8" if self.form == "float8" else "int4"


def published_of(said: Any) -> Published | None:
    """Return the format that a ``quantization_config`` declares; None if it is none of these. Raises
    ``PackagingError`` for a variant that is not supported, which names the entry."""
    if not isinstance(said, dict):
        return None
    method = said.get("quant_method")
    if method == "awq":
        _check(said, {"bits": (4,), "version": ("gemm", "GEMM", None), "zero_point": (True, None)})
        return Published("awq", _group(said.get("group_size", 128)))
    if method == "gptq":
        _check(said, {"bits": (4,), "checkpoint_format": ("gptq", "gptq_v2", None), "dynamic": (None, {})})
        minus_one = said.get("checkpoint_format") != "gptq_v2"
        return Published("gptq", _group(said.get("group_size", 128)), int(minus_one))
    if method == "compressed-tensors" and said.get("format") in COMPRESSED:
        return _compressed(said, COMPRESSED[said["format"]])
    return None


def _compressed(said: dict[str, Any], form: Form) -> Published:
    _check(said, {"transform_config": (None, {}), "sparsity_config": (None, {})})
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(one, dict) for one in groups.values()):
        raise _refused("config_groups", groups, "groups with weights")
    found = set()
    for name, one in groups.items():
        weights, inputs = one.get("weights"), one.get("input_activations")
        if not isinstance(weights, dict):
            raise _refused(f"config_groups.{name}.weights", weights, "how weights are quantised")
        where = f"config_groups.{name}.weights."
        if form == "packed":
            _check(weights, {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel")}, where)
            if inputs is not None:
                raise _refused(f"config_groups.{name}.input_activations", inputs, "null")
            found.add(Published(form, _group(weights.get("group_size") or -1, f"{where}group_size"), 0))
        else:
            _check(weights, {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor")}, where)
            if inputs is not None and not isinstance(inputs, dict):
                raise _refused(f"config_groups.{name}.input_activations", inputs, "null or float8")
            if inputs:
                _check(inputs, {"num_bits": (8,), "type": ("float",)}, f"config_groups.{name}.input_activations.")
            found.add(Published(form))
    if len(found) > 1:
        raise _refused("config_groups", groups, "groups whose weights are quantised alike")
    return found.pop()


def _check(said: dict[str, Any], allowed: dict[str, tuple[Any, ...]], where: str = "") -> None:
    for name, values in allowed.items():
        value = said.get(name)
        if not any(type(value) is type(one) and value == one for one in values):
            raise _refused(
                f"{where}{name}", value, " or ".join(repr(one) for one in values if one is not None) or "null"
            )


def _group(value: Any, name: str = "group_size") -> int:
    if type(value) is not int or not (value == -1 or (value > 0 and value % 8 == 0)):
        raise _refused(name, value, "-1, or a multiple of 8")
    return value


def _refused(name: str, value: Any, expected: str) -> PackagingError:
    return PackagingError(
        f"config.json: quantization_config.{name}: {shown(value)} is not allowed; expected {expected}; engine vllm runs"
        " others"
    )


def linears_in(names: set[str], form: Published) -> Iterator[str]:
    """Yield the paths of the linears that are stored in this format, by the names of all tensors."""
    for name in sorted(names):
        path, _, own = name.rpartition(".")
        if own == FIRST[form.form] and (form.form != "float8" or f"{path}.weight_scale" in names):
            yield path


def read(
    form: Published, path: str, shape: tuple[int, int], get: Get
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read the linear ``path`` [N, K] = ``shape``: values, scales and zeros as ``StoredLinear`` has them.

    Raises ``PackagingError``, which names the tensor."""
    rows, columns = shape
    group = columns if form.group == -1 else form.group
    if form.form == "float8":
        values = _tensor(get, f"{path}.weight", (torch.float8_e4m3fn,), shape)
        scale = get(f"{path}.weight_scale")
        if scale is None or scale.numel() not in (1, rows) or not scale.is_floating_point():
            raise PackagingError(
                f"{path}.weight_scale is not allowed; expected one scale, or one for each of {rows} rows"
            )
        return values, scale.float().reshape(-1, 1).expand(rows, 1).contiguous(), None
    if columns % group or columns % 8 or (rows % 8 and form.form != "packed"):
        raise PackagingError(f"{path}: {rows} x {columns} weights are not allowed in groups of {group} and words of 8")
    groups, floats = columns // group, (torch.float16, torch.bfloat16, torch.float32)
    if form.form == "packed":
        _check_order(get, f"{path}.weight_g_idx", group)
        words = _tensor(get, f"{path}.weight_packed", (torch.int32,), (rows, columns // 8))
        scale = _tensor(get, f"{path}.weight_scale", floats, (rows, groups))
        zero = torch.full((rows, groups), 8, dtype=torch.uint8)
        if (kept := get(f"{path}.weight_zero_point")) is not None:
            zero = _zero_points(path, kept, rows, groups)
        return words.contiguous().view(torch.uint8), scale, zero
    scale = _tensor(get, f"{path}.scales", floats, (groups, rows)).t().contiguous()
    zeros = _nibbles(_tensor(get, f"{path}.qzeros", (torch.int32,), (groups, rows // 8)))
    if form.form == "gptq":
        _check_order(get, f"{path}.g_idx", group)
        words = _tensor(get, f"{path}.qweight", (torch.int32,), (columns // 8, rows))
        zero = ((zeros + form.zero_offset) & 15).t().contiguous()
        return words.t().contiguous().view(torch.uint8), scale, zero
    values = _in_order(_nibbles(_tensor(get, f"{path}.qweight", (torch.int32,), (columns, rows // 8)))).t()
    return values[:, ::2] | (values[:, 1::2] << 4), scale, _in_order(zeros).t().contiguous()


def _zero_points(path: str, kept: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    name = f"{path}.weight_zero_point"
    if kept.dtype == torch.int8:
        return (_tensor({name: kept}.get, name, (torch.int8,), (rows, groups)) + 8).to(torch.uint8)
    words = _tensor({name: kept}.get, name, (torch.int32,), (-(-rows // 8), groups))
    return _nibbles(words.t())[:, :rows].t().contiguous()


def _tensor(get: Get, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> torch.Tensor:
    value = get(name)
    if value is None:
        raise PackagingError(f"the weights are incomplete: they lack {name}")
    if value.dtype not in dtypes or tuple(value.shape) != shape:
        raise PackagingError(
            f"{name}: {value.dtype} of shape {tuple(value.shape)} is not allowed; config.json gives"
            f" {' or '.join(map(str, dtypes))} of {shape}"
        )
    return value


def _check_order(get: Get, name: str, group: int) -> None:
    """Refuse inputs whose groups are not neighbours (act-order)."""
    order = get(name)
    if order is not None and not torch.equal(order.long(), torch.arange(len(order)) // group):
        raise PackagingError(
            f"{name}: inputs in another order than that of their groups are not allowed; expected a checkpoint made"
            " with desc_act or actorder off; engine vllm runs others"
        )


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the values of int32 [.., J] as uint8 [.., 8 J], of the lowest bits first."""
    found = words.contiguous().view(torch.uint8)
    return torch.stack((found & 15, found >> 4), -1).flatten(-2)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)
