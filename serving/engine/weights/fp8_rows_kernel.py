"""Triton kernels that quantise rows to float8 (e4m3fn) with a scale each, as ``fp8.quantize_rows`` does, to the bit.

::

    scale  = max(largest |value| / 448, 1e-12)
    code   = |value / scale|, rounded to the nearest number of e4m3fn, the even one if two are as near
             from 2^-6 on   3 of float32's 23 bits of mantissa are left, and the exponent's bias becomes 7
             below          a multiple of 2^-9: added to 2^14, whose last bit that is
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(peak: tl.tensor) -> tl.tensor:
    """Return the scale of a row whose largest absolute value is ``peak``."""
    return tl.maximum(peak * (1.0 / 448), 1e-12)


@triton.jit
def codes(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the bytes of e4m3fn nearest to values / scale, both float32."""
    scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
    size = tl.abs(scaled)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0.015625, small, normal), 0x7E)
    code = tl.where(scaled == scaled, code, 0x7F)
    return (code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize(
    x: tl.tensor, q: tl.tensor, scale: tl.tensor, size: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Quantise a row of ``size`` values, uint8 in ``q`` and float32 in ``scale``; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    peaks = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        some = tl.load(x + row * stride + start + at, mask=start + at < size, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(some.to(tl.float32)))
    own = scale_of(tl.max(peaks, 0))
    tl.store(scale + row, own)
    for start in range(0, size, BLOCK):
        some = tl.load(x + row * stride + start + at, mask=start + at < size, other=0.0)
        tl.store(q + row * size + start + at, codes(some.to(tl.float32), own), mask=start + at < size)
