"""A Triton kernel for few rows times float8 (e4m3fn) weights, which are read as bytes and are floats in registers only.

A byte is converted to float16 by moving its bits, exactly, on every device::

    e4m3fn    s eeee mmm                    exponent's bias 7
    float16   s 0eeee mmm0000000            bias 15: 1/256 of the value, subnormal if the byte is
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiply x [M, K] by ``values``, uint8 [N, K], → out [M, N]. M is at most BLOCK_M; a program takes BLOCK_N rows
    of ``values``. Products have x's type; sums, ``scale`` and ``bias`` [N] are float32."""
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    from_x = x + row[:, None] * K + at[None, :]
    from_values = values + column[None, :].to(tl.int64) * K + at[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + at < K
        some = tl.load(from_x + start, mask=(row < M)[:, None] & inside[None, :], other=0.0)
        bits = tl.load(from_values + start, mask=inside[:, None] & (column < N)[None, :], other=0).to(tl.uint16)
        halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        sums = tl.dot(some, halves.to(some.dtype), sums, input_precision="ieee")
    y = sums * (tl.load(scale + column, mask=column < N, other=0.0) * 256.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + column, mask=column < N, other=0.0)[None, :]
    place = row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])
