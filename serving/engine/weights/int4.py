"""int4 linears on CUDA: weights of four bits in groups of inputs, with a scale and a zero point each.

Few rows are multiplied by a kernel that reads four bits a weight (``int4_kernel.py``); for more rows the weights become
floats, by another kernel, for the time of a product. Both kernels prove themselves on an example first."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..devices import overlap, triton_support
from .fp8 import BLOCK_N, num_blocks, split_of

logger = logging.getLogger(__name__)
FEW_ROWS = 64  # rows that a program of the kernel has room for
MAX_CHUNK, MIN_CHUNK = 128, 32  # inputs that are read at once; a group is a multiple of them
NUM_WARPS, NUM_STAGES = 4, 4
PREFETCHED_BYTES = 1024  # bytes of a row that a program fetches before it waits for the kernel before
TOLERANCE = {torch.float32: 1e-4}  # relative to the example's largest value; 0.02 for 16-bit types


def chunk_of(group: int) -> int:
    """Return how many inputs the kernel reads at once of groups of this size; 0 if it does not take such groups."""
    chunk = min(group & -group, MAX_CHUNK)  # a power of two that divides it
    return chunk if chunk >= MIN_CHUNK else 0


def packed(values: torch.Tensor, group: int) -> torch.Tensor:
    """Pack uint8 values [N, K] of 0..15 as the kernel reads them, [N, K / 2]."""
    low, high = values.unflatten(1, (-1, 2, chunk_of(group) // 2)).unbind(2)
    return (low | (high << 4)).flatten(1).contiguous()


class Int4Weight:
    """A ``PackedWeight`` of uint8 values of four bits [N, K / 2], scales and uint8 zeros [groups, N]."""

    few: ClassVar[int] = FEW_ROWS
    __slots__ = ("bias", "dtype", "finished", "group", "in_features", "out_features", "scale", "values", "zero")

    def __init__(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        """Take values [N, K] of 0..15, and scales and zeros [N, groups] (weight = (value - zero) * scale)."""
        self.out_features, self.in_features = values.shape
        self.group, self.dtype = self.in_features // scale.shape[1], dtype
        self.values = packed(values, self.group).to(device)
        self.scale, self.zero = (one.t().contiguous().to(device) for one in (scale, zero))
        self.bias = None if bias is None else bias.float()
        self.finished = torch.zeros(num_blocks(self.out_features), dtype=torch.int32, device=device)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.few:
            return multiply(x, self)
        return F.linear(x, self.dense(), None if self.bias is None else self.bias.to(x.dtype))

    def dense(self) -> torch.Tensor:
        return dequantize(self)


def multiply(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """Multiply x [T, K], of at most ``FEW_ROWS`` rows, by a weight [N, K] → [T, N] with the kernel."""
    from . import int4_kernel as kernel

    rows, N, K, chunk = len(x), weight.out_features, weight.in_features, chunk_of(weight.group)
    blocks, split = num_blocks(N), split_of(N, K, chunk)
    out = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    partial = torch.empty(split, rows, N, device=x.device) if split > 1 else out
    bias = out if weight.bias is None else weight.bias
    kernel.multiply[(blocks, split)](
        x.contiguous(), weight.values, weight.scale, weight.zero, bias, out, partial, weight.finished, rows, N, K,
        overlap.fetched(weight.values, PREFETCHED_BYTES), HAS_BIAS=weight.bias is not None, SPLIT=split,
        BLOCK_M=max(16, 1 << (rows - 1).bit_length()), BLOCK_N=BLOCK_N, CHUNK=chunk,
        GROUP=weight.group, PACKED=x.is_cuda and x.dtype == torch.bfloat16, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES, **overlap.options(x.device),
    )  # fmt: skip
    return out


def dequantize(weight: Int4Weight) -> torch.Tensor:
    """Return the weights [N, K] in the model's type, each rounded once."""
    from . import int4_kernel as kernel

    N, K, chunk = weight.out_features, weight.in_features, chunk_of(weight.group)
    out = torch.empty(N, K, dtype=weight.dtype, device=weight.values.device)
    kernel.dequantize[(num_blocks(N), K // chunk)](
        weight.values, weight.scale, weight.zero, out, N, K, BLOCK_N=BLOCK_N, CHUNK=chunk, GROUP=weight.group
    )
    return out


def why_not(device: Any, dtype: torch.dtype, group: int) -> str:
    """Return why weights in groups of this size stay floats on ``device``; empty if they are multiplied as they are."""
    if why := triton_support.why_disabled(device):
        return why
    if not chunk_of(group):
        return f"groups of {group} inputs are not multiples of {MIN_CHUNK}"
    return why_wrong(device, dtype, chunk_of(group))


@cache
def report(why: str) -> None:
    """Log, once, why weights are made floats at load on a device that could multiply four bits."""
    logger.warning("int4: weights of four bits are made floats: %s", why)


@cache
def why_wrong(device: Any, dtype: torch.dtype, chunk: int) -> str:
    make = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (72, 8 * chunk), dtype=torch.uint8, generator=make)
    zero = torch.randint(0, 16, (72, 8), dtype=torch.uint8, generator=make)
    scale, bias = torch.rand(72, 8, generator=make), torch.randn(72, generator=make).to(device)
    x = torch.randn(FEW_ROWS, 8 * chunk, generator=make).to(device, dtype)
    exact = ((values.float().view(72, 8, -1) - zero[..., None]) * scale[..., None]).flatten(1).to(device)
    weight = Int4Weight(values, scale, zero, bias, dtype, device)
    tolerance = TOLERANCE.get(dtype, 0.02)

    def found() -> torch.Tensor:
        return torch.cat([multiply(x[:3], weight), multiply(x, weight)])

    def wanted() -> torch.Tensor:
        return F.linear(torch.cat([x[:3], x]).float(), exact, bias)

    return triton_support.why_wrong(found, wanted, tolerance, "the product of four bits") or triton_support.why_wrong(
        weight.dense, lambda: exact.to(dtype), 0.0, "the conversion of four bits"
    )
