"""Layouts of a linear's weights for the hardware: one interface, one class per layout.

::

    PackedWeight        matmul(x [T, K]) -> [T, N];  dense() -> [N, K]
    ├── PlainWeight     torch's own GEMM: on CUDA, and wherever the next layout is not offered
    ├── OneDnnWeight    float32 and bfloat16 on CPU, blocked once at load by oneDNN
    ├── Int8Weight      quantization.py
    ├── Fp8Weight       fp8.py: on CUDA
    └── NativeWeight    native/weight.py: float32, bfloat16, int8 and int4 where the native kernels run

A further kernel only needs these two methods.

Measurements of oneDNN's layout (30 layers of SmolLM2-135M's fused shapes, 2 Zen 4 cores, torch 2.13; ms per step):

    rows                   1      4      8     32    128
    float32 plain       31.5   62.5   37.6   62.8  165.7
    float32 OneDnn      18.0   15.4   18.9   40.8  129.8
    bfloat16 plain      14.0   16.5   17.5   29.5   78.3
    bfloat16 OneDnn     10.3    8.9   10.8   22.6   70.6

The operators are those that inductor emits when it freezes a model."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

ROWS_HINT = 8  # tunes oneDNN's layout; layouts for 1 and 128 rows measured within 5 % of this one at every count


class PackedWeight(Protocol):
    """Packed weights [N, K] and, if the linear has one, a bias [N]."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [T, K] -> [T, N], a new tensor of ``x.dtype`` that the caller may change in place."""
        ...

    def dense(self) -> torch.Tensor:
        """Return the weights as [N, K] of ``dtype``; a copy unless they are stored so."""
        ...


class PlainWeight:
    """Weights for torch's own GEMM. Shares the tensor it is given, so a tied head costs no memory."""

    __slots__ = ("bias", "dtype", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias, self.dtype = weight.detach(), bias, weight.dtype

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def dense(self) -> torch.Tensor:
        return self.weight


class OneDnnWeight:
    """Weights blocked by oneDNN at load. Has no gradient."""

    __slots__ = ("bias", "blocked", "dtype", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.bias = weight.dtype, bias
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return y

    def dense(self) -> torch.Tensor:
        return self.blocked.to_dense()


def can_block(weight: torch.Tensor) -> bool:
    """Return whether oneDNN, in this build and on this CPU, supports a weight of this dtype and device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack_float(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Pack weights [N, K] in oneDNN's layout if it supports them, else as they are."""
    return OneDnnWeight(weight, bias) if can_block(weight) else PlainWeight(weight, bias)
