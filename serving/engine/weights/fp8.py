"""fp8 linears: weights in float8 (e4m3fn) per output channel, activations unchanged or in float8 per token.

::

    rows     1 … FEW                          more
    reads    N K bytes                        N K bytes
    x        as it is                         float8, a scale a row
    by       fp8_kernel.py, else as floats    torch._scaled_mm, else as floats

With few rows the time goes into reading the weights, and products are as exact as with floats. With many rows it goes
into the products, which devices from compute capability 8.9 on compute faster in float8. A row's results therefore
depend on how many rows are computed with it, by more than the last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...interface.errors import PackagingError
from ...interface.settings import EngineSettings
from ..devices import overlap, triton_support
from . import fp8_inputs

logger = logging.getLogger(__name__)
MAX_E4M3 = 448  # the largest value of e4m3fn
MIN_SCALE = 1e-12  # the scale of a row of zeros, rather than 0; it quantises to zeros
FEW_ROWS = 32  # above, products in float8 are faster, on an H100 by 40 % at 64 rows
WIDTH_MULTIPLE = 16  # widths must be multiples of this for torch._scaled_mm on CUDA
CAPABILITY = (8, 9)  # Ada, the first with products in float8
BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 64, 128, 4, 4  # of the kernel
TILE_STAGES = 5  # with tensor descriptors, which are faster by 8 % on an H100
ROW_BLOCK_N, ROW_BLOCK_K, ROW_WARPS = 4, 1024, 2  # of the kernel for one row: the fastest of four on an H100
PREFETCHED_VALUES = 1024  # values of a row that a program fetches before it waits for the kernel before
MIN_STEPS = 4  # of a program: fewer would not hide the first loads
ROW_BLOCK = 4096  # values of a row that are read at once when it is quantised
PROGRAMS = 3 * 132  # the kernel's at least, if K is long enough: three for each multiprocessor of an H100
EXAMPLE_WIDTHS = (528, 1024)  # one that fills no block, and one that is split into parts of whole blocks
TOLERANCE = {torch.float32: 1e-4}  # relative to the example's largest value; 0.02 for 16-bit types


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` [T, K] to float8_e4m3fn [T, K] and float32 scales [T, 1], so that ``x ≈ q * scale``."""
    scale = x.abs().amax(-1, keepdim=True).float().mul_(1 / MAX_E4M3).clamp_min_(MIN_SCALE)
    return (x / scale).to(torch.float8_e4m3fn), scale


def can_quantize(weight: torch.Tensor) -> bool:
    """Return whether a weight can be quantised. Gates and scalar heads stay in float: they cost little and matter much.
    On CUDA the widths must suit torch._scaled_mm."""
    rows, columns = weight.shape
    return min(rows, columns) >= 16 and (
        weight.device.type == "cpu" or rows % WIDTH_MULTIPLE == columns % WIDTH_MULTIPLE == 0
    )


class Fp8Weight:
    """A ``PackedWeight`` of float8 values [N, K] and float32 scales [N]. Up to ``few`` rows count as few."""

    few: ClassVar[int] = FEW_ROWS
    __slots__ = (
        "bias",
        "by_kernel",
        "by_scaled_mm",
        "dtype",
        "finished",
        "in_features",
        "out_features",
        "scale",
        "values",
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        values, scale = quantize_rows(weight.detach().float().contiguous())  # a Conv1D's weight is transposed
        self._hold(values, scale, bias, weight.dtype)

    @classmethod
    def of(cls, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Fp8Weight:
        """Build it from float8 values and scales [N, 1] that were stored, for a model in ``dtype``."""
        weight = cls.__new__(cls)
        weight._hold(values, scale, bias, dtype)
        return weight

    def _hold(self, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = values.shape
        self.values, self.scale, self.dtype = values, scale.flatten(), dtype
        self.bias = None if bias is None else bias.float()
        self.finished = torch.zeros(num_blocks(self.out_features), dtype=torch.int32, device=values.device)
        self.by_kernel = not why_not_kernel(values.device, dtype)
        self.by_scaled_mm = not why_not_scaled_mm(values.device)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.few and self.by_kernel:
            return multiply(x, self.values, self.scale, self.bias, self.finished)
        if len(x) > self.few and self.by_scaled_mm:
            return multiply_quantized(x, self.values, self.scale, self.bias)
        return multiply_floats(x, self.values, self.scale, self.bias)

    def dense(self) -> torch.Tensor:
        return (self.values.float() * self.scale[:, None]).to(self.dtype)


def multiply(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    finished: torch.Tensor | None = None,
    *,
    in_tiles: bool | None = None,
) -> torch.Tensor:
    """Multiply x [T, K], of at most ``FEW_ROWS`` rows, by values [N, K] → [T, N] with the kernels: that for one row, or
    that for more, whose last bits are others.

    ``finished`` are counters of the kernel, at least as many as ``num_blocks`` and zeros, as it also leaves them; None
    makes some. Products that may run at the same time must not share them. ``in_tiles``: whether weights are read by
    tensor descriptors; None if the device reads them so."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import fp8_kernel as kernel

    (rows, K), N = x.shape, len(values)
    if rows == 1:
        return _multiply_row(x, values, scale, bias)
    block_m = max(16, 1 << (rows - 1).bit_length())
    blocks, split = num_blocks(N), split_of(N, K)
    out = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    partial = torch.empty(split, rows, N, device=x.device) if split > 1 else scale
    if finished is None:
        finished = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    codes, known_bias = values.view(torch.uint8), scale if bias is None else bias
    if in_tiles is None:
        in_tiles = K % BLOCK_K == 0 and overlap.fetched(values, 1) > 0 and not why_not_tiles(x.device, x.dtype)
    tiles = TensorDescriptor.from_tensor(codes, [BLOCK_N, BLOCK_K]) if in_tiles else codes
    kernel.multiply[(blocks, split)](
        x.contiguous(), codes, tiles, scale, known_bias, out, partial, finished, rows, N, K,
        overlap.fetched(values, PREFETCHED_VALUES), HAS_BIAS=bias is not None, SPLIT=split, BLOCK_M=block_m,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, WHOLE_K=K % BLOCK_K == 0, DECODE=decoding(x.device, x.dtype),
        IN_TILES=in_tiles, num_warps=NUM_WARPS, num_stages=TILE_STAGES if in_tiles else NUM_STAGES,
        **overlap.options(x.device),
    )  # fmt: skip
    return out


def _multiply_row(x: Any, values: Any, scale: Any, bias: Any) -> torch.Tensor:
    from . import fp8_kernel as kernel

    N, K = values.shape
    out = torch.empty(1, N, dtype=x.dtype, device=x.device)
    way = decoding(x.device, x.dtype)
    if way == "native" and x.dtype == torch.bfloat16:
        way = "packed"  # as measured
    kernel.multiply_row[(-(-N // ROW_BLOCK_N),)](
        x.contiguous(), values.view(torch.uint8), scale, scale if bias is None else bias, out, N, K,
        overlap.fetched(values, PREFETCHED_VALUES),
        HAS_BIAS=bias is not None, BLOCK_N=ROW_BLOCK_N, BLOCK_K=ROW_BLOCK_K, WHOLE_K=K % ROW_BLOCK_K == 0,
        DECODE=way, num_warps=ROW_WARPS, num_stages=1, **overlap.options(x.device),
    )  # fmt: skip
    return out


def num_blocks(N: int) -> int:
    """Return how many blocks of rows the kernel takes weights [N, K] in."""
    return -(-N // BLOCK_N)


def split_of(N: int, K: int, step: int = BLOCK_K) -> int:
    """Return into how many parts the kernel splits K, of which it reads ``step`` at once, so that its programs occupy a
    device. It does not depend on the number of rows, so that a row's sums do not either."""
    split = 1
    while num_blocks(N) * split < PROGRAMS and 2 * split * MIN_STEPS * step <= K:
        split *= 2
    return split


@cache
def decoding(device: Any, dtype: torch.dtype) -> str:
    """Return how the kernel converts bytes to ``dtype`` on ``device`` (``fp8_kernel.py``); "native" is the fastest on
    an H100, by 3 to 9 %."""
    if device.type != "cuda":
        return "shift"
    capability = torch.cuda.get_device_capability(device)
    if capability >= CAPABILITY:
        return "native"
    return "packed" if dtype == torch.bfloat16 and capability >= (8, 0) else "shift"


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows(x)`` as the kernel that computed x left it, or else by one kernel, or else by torch."""
    if (made := fp8_inputs.take(x)) is not None:
        return made
    return quantize_rows(x.contiguous()) if why_not_one_kernel(x.device, x.dtype) else quantize_by_kernel(x)


def quantize_by_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``quantize_rows(x)``, to the bit, by one kernel."""
    from . import fp8_rows_kernel as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, size), scale = x.shape, torch.empty(len(x), 1, device=x.device)
    q = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    block = min(1 << (size - 1).bit_length(), ROW_BLOCK)
    kernel.quantize[(rows,)](x, q.view(torch.uint8), scale, size, x.stride(0), BLOCK=block)
    return q, scale


def multiply_quantized(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply any number of rows, rounded to float8, by the device's float8 products."""
    q, row_scale = quantized(x)
    # bfloat16 is the only result type that CUDA offers with one scale per row
    y = torch._scaled_mm(q, values.t(), scale_a=row_scale, scale_b=scale[None], out_dtype=torch.bfloat16)
    return (y if bias is None else y + bias).to(x.dtype)


def multiply_floats(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by torch, with the weights converted to floats each time: the reference."""
    return F.linear(x, (values.float() * scale[:, None]).to(x.dtype), None if bias is None else bias.to(x.dtype))


@contextmanager
def all_rows_are_many() -> Iterator[None]:
    """Treat any number of rows as many, so that a self-test of a few tokens tests that path."""
    few, Fp8Weight.few = Fp8Weight.few, 0
    try:
        yield
    finally:
        Fp8Weight.few = few


def refuse(settings: EngineSettings, device: Any) -> None:
    """Raise ``PackagingError`` if fp8 is asked for and not available."""
    if settings.quantization == "fp8" and device.type == "cpu" and settings.kernels == "auto":
        raise PackagingError(
            "quantization: 'fp8' is not allowed; expected 'none' or 'int8' on CPU with kernels auto: our own kernels"
            " do not support fp8 (kernels: torch does, slowly, and a checkpoint that is stored in fp8 needs it there)"
        )


def reason(settings: EngineSettings, device: Any, dtype: torch.dtype) -> str:
    """Return why few rows or many are multiplied by fp8 weights as floats; empty if neither are."""
    if settings.quantization != "fp8":
        return ""
    reasons = {"few": why_not_kernel(device, dtype), "many": why_not_scaled_mm(device)}
    return "; ".join(f"{rows} rows are multiplied as floats: {why}" for rows, why in reasons.items() if why)


@cache
def why_not_kernel(device: Any, dtype: torch.dtype) -> str:
    """Return why the kernel does not run; empty if it does."""
    return triton_support.why_disabled(device) or _differs(multiply, device, dtype, (1, 3, FEW_ROWS))


@cache
def why_not_tiles(device: Any, dtype: torch.dtype) -> str:
    """Return why weights are not read by tensor descriptors; empty if they are."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < overlap.CAPABILITY:
        return "the device has no tensor memory accelerator"
    make = torch.Generator().manual_seed(0)
    values, scale = quantize_rows(torch.randn(112, 2048, generator=make).to(device))
    for rows in (3, FEW_ROWS):
        x = torch.randn(rows, 2048, generator=make).to(device, dtype)
        read = partial(multiply, x, values, scale.flatten(), None)
        reason = triton_support.why_wrong(
            partial(read, in_tiles=True),
            partial(read, in_tiles=False),
            TOLERANCE.get(dtype, 0.02),
            "reading by tensor descriptors",
        )
        if reason:
            logger.warning("fp8: %s", reason)
            return reason
    return ""


@cache
def why_not_one_kernel(device: Any, dtype: torch.dtype) -> str:
    """Return why torch quantises rows; empty if one kernel does."""
    x = torch.randn(3, 528, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return triton_support.why_disabled(device) or triton_support.why_wrong(
        lambda: torch.cat([one.float() for one in quantize_by_kernel(x)], 1),
        lambda: torch.cat([one.float() for one in quantize_rows(x)], 1),
        0.0,
        "the quantisation of rows",
    )


@cache
def why_not_scaled_mm(device: Any) -> str:
    """Return why torch._scaled_mm does not run; empty if it does."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the device has no products in float8"
    return _differs(multiply_quantized, device, torch.bfloat16, (FEW_ROWS + 1,))


def _differs(product: Any, device: Any, dtype: torch.dtype, counts: tuple[int, ...]) -> str:
    """Return why ``product`` is not used, by an example; empty if it agrees. A device's compiler may be missing or
    wrong."""
    make = torch.Generator().manual_seed(0)
    for width in EXAMPLE_WIDTHS:
        values, scale = quantize_rows(torch.randn(48, width, generator=make).to(device))
        bias = torch.randn(48, generator=make).to(device)
        for count in counts:
            x = torch.randn(count, width, generator=make).to(device, dtype)
            known = x if product is multiply else rounded(x)
            reason = triton_support.why_wrong(
                partial(product, x, values, scale.flatten(), bias),
                partial(multiply_floats, known.float(), values, scale.flatten(), bias),
                TOLERANCE.get(dtype, 0.02),
                "it",
            )
            if reason:
                logger.warning("fp8: %s is not used: %s", product.__name__, reason)
                return reason
    return ""


def rounded(x: torch.Tensor) -> torch.Tensor:
    q, scale = quantize_rows(x)
    return q.float() * scale
