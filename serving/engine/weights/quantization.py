"""int8 linears: per-channel quantization of weights, per-token quantization of activations.

Each token has a scale of its own, rather than one scale for the whole tensor: with a shared scale, a request's result
depends on the rest of its batch, and perplexity doubles. The product of int8 rows is exact in int32, so a token's
result is bitwise the same alone or in any batch.

Both factors are first multiplied by the same Hadamard matrix (``rotated``), which leaves the product as it is, but
spreads an outlier of the activations over other inputs, so that it does not take their levels (QuaRot: Ashkboos et al.
2024, arxiv.org/abs/2404.00456). Perplexity of SmolLM2-135M over 8,184 tokens is 23.81 in float32, 23.89 in int8, and
24.44 in int8 with linears that are not rotated.

Before that, each input may have a factor, by which activations are multiplied and weights divided
(input_factors.py).

Time of 30 layers of SmolLM2-135M's fused shapes, quantisation included, on 2 Zen 4 cores, in ms at 1 / 8 / 32 rows:
``_int_mm`` 7.7 / 13 / 25; ``onednn.qlinear`` with zero point 128 11 / 12.5 / 22; ``_weight_int8pack_mm`` 44 / 356 /
1416. The first is used: it is fastest at one row, exact by construction, and the same op on CUDA.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

MAX_LEVEL = 127  # symmetric: -128 is left unused so that x and -x quantise alike
MIN_SCALE = 1e-12  # the scale of a row of zeros, rather than 0: the row quantises to zeros
CUDA_MIN_ROWS = 17  # torch._int_mm on CUDA refuses 16 rows or fewer
CUDA_MULTIPLE = 8  # and widths that are not a multiple of this


def hadamard_order(width: int) -> int:
    """Return how many neighbouring inputs are mixed with each other: the largest power of two that divides the
    width."""
    return width & -width


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return rows [.., K] times Sylvester's orthonormal Hadamard matrix, in blocks of ``hadamard_order(K)``: float32.

    It is its own inverse, except for rounding. By sums and differences in the order of native/hadamard.h, and not by a
    matrix product, a row is bitwise the same alone and in any batch, and by native kernels."""
    order, stride = hadamard_order(x.shape[-1]), 1
    found = x.detach().float().contiguous() * (1 / math.sqrt(order))
    other = torch.empty_like(found)
    while stride < order:
        given, made = found.view(-1, 2, stride), other.view(-1, 2, stride)
        torch.add(given[:, 0], given[:, 1], out=made[:, 0])
        torch.sub(given[:, 0], given[:, 1], out=made[:, 1])
        found, other, stride = other, found, stride * 2
    return found


def divided(weight: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
    """Return weights [N, K] whose product with activations times ``inputs`` [K] is the same, bit for bit as in
    native/linear/layout.h."""
    return weight if inputs is None else weight.float() * inputs.reciprocal()


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` [T, K] float -> int8 [T, K] and float32 scales [T, 1] with ``x ≈ q * scale``."""
    scale = x.abs().amax(-1, keepdim=True).float().mul_(1 / MAX_LEVEL).clamp_min_(MIN_SCALE)
    return (x * scale.reciprocal()).round_().to(torch.int8), scale  # bit for bit as in native/linear.h


def can_quantize(weight: torch.Tensor) -> bool:
    """Return whether a weight [N, K] can be quantised. On CUDA the widths must fit the op.

    Gates and scalar heads stay in float: they cost nothing and have a large effect."""
    rows, columns = weight.shape
    if min(rows, columns) < 16:
        return False
    return weight.device.type == "cpu" or (rows % CUDA_MULTIPLE == 0 and columns % CUDA_MULTIPLE == 0)


class Int8Weight:
    """A ``PackedWeight`` of int8 values [N, K] and float32 scales [N], of rotated weights or of plain ones. ``inputs``
    [K] are factors of the activations of rotated weights, None if they are all 1."""

    __slots__ = ("bias", "dtype", "in_features", "inputs", "is_rotated", "out_features", "scale", "values")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_rotated: bool = True,
        inputs: torch.Tensor | None = None,
    ) -> None:
        dense = rotated(divided(weight.detach(), inputs)) if is_rotated else weight.detach().float()
        self._hold(*quantize_rows(dense), bias, weight.dtype, is_rotated, inputs)

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        is_rotated: bool,
        inputs: torch.Tensor | None = None,
    ) -> Int8Weight:
        """Build it from weights that ``quantize_rows`` quantised earlier, for a model in ``dtype``."""
        weight = cls.__new__(cls)
        weight._hold(values, scale, bias, dtype, is_rotated, inputs)
        return weight

    def _hold(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        is_rotated: bool,
        inputs: torch.Tensor | None,
    ) -> None:
        assert inputs is None or is_rotated
        self.inputs = None if inputs is None else inputs.to(values.device)
        self.out_features, self.in_features = values.shape
        self.values, self.scale, self.dtype, self.is_rotated = values, scale.flatten(), dtype, is_rotated
        self.bias = None if bias is None else bias.float()

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x if self.inputs is None else x.float() * self.inputs
        q, row_scale = quantize_rows(rotated(scaled) if self.is_rotated else scaled)
        rows = x.shape[0]
        if x.is_cuda and rows < CUDA_MIN_ROWS:
            q = F.pad(q, (0, 0, 0, CUDA_MIN_ROWS - rows))
        # A transposed view, not a transposed copy: measured 2x faster at one row.
        y = torch._int_mm(q, self.values.t())[:rows].float().mul_(row_scale).mul_(self.scale)
        if self.bias is not None:
            y.add_(self.bias)
        return y.to(x.dtype)

    def dense(self) -> torch.Tensor:
        dense = self.values.float() * self.scale[:, None]
        dense = rotated(dense) if self.is_rotated else dense
        return (dense if self.inputs is None else dense * self.inputs).to(self.dtype)
