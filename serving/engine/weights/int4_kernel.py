"""Triton kernels over four-bit weights in groups, whose values are floats in registers only.

::

    byte j of chunk c   value c CHUNK + j in its low half, c CHUNK + CHUNK / 2 + j in its high half, so that both
                        halves of a block of bytes are multiplied by neighbouring columns of x
    weight              (value - zero) * scale, of the group that the chunk is part of

As in ``fp8_kernel.py`` weights are the left operand, and K is split over programs. Differences value - zero are exact
in 16 bits; a chunk's products are summed in float32 and then scaled. ``PACKED``: four bytes at once, for bfloat16, by
putting a value into the mantissa of 128 (0x4300) and subtracting 128 + zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..devices.overlap_kernel import begin_with
from .fp8_kernel import joined

TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, a<4>, one;
mov.b32 one, 0x3f803f80;
and.b32 low, $4, 0x0f0f0f0f;
shr.b32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 a0, low, 0x43434343, 0x4140;
prmt.b32 a1, low, 0x43434343, 0x4342;
prmt.b32 a2, high, 0x43434343, 0x4140;
prmt.b32 a3, high, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, a0, one, $5;
fma.rn.bf16x2 $1, a1, one, $6;
fma.rn.bf16x2 $2, a2, one, $5;
fma.rn.bf16x2 $3, a3, one, $6;
}""")


@triton.jit
def halves(bits: tl.tensor, zero: tl.tensor, dtype: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Return value - zero of the low halves and of the high halves of ``bits`` [N, C], with ``zero`` [N] in float32."""
    if PACKED:
        offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], bits.shape)
        return tl.inline_asm_elementwise(
            TO_BF16, "=r,=r,=r,=r,r,r,r", [bits, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    low = (bits & 15).to(tl.float32) - zero[:, None]
    high = (bits >> 4).to(tl.float32) - zero[:, None]
    return low.to(dtype), high.to(dtype)


@triton.jit(do_not_specialize=["M", "fetched"])
def multiply(
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    finished: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    fetched: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply x [M, K] by weights [N, K], uint8 ``values`` [N, K / 2], → out [M, N]. M is at most BLOCK_M; a program
    takes BLOCK_N rows of weights, and with ``SPLIT`` one part of K. ``scale`` and uint8 ``zero`` are [K / GROUP, N].
    CHUNK divides GROUP and K. ``fetched`` is how many bytes of each row a program fetches before it waits
    (``overlap_kernel.py``)."""
    block, part = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = CHUNK // 2
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, HALF)
    chunks = K // CHUNK
    each = tl.cdiv(chunks, SPLIT)
    first = part * each * HALF
    share = tl.minimum(tl.minimum(each * HALF, K // 2 - first), fetched)
    block_values = values + block.to(tl.int64) * BLOCK_N * (K // 2)
    begin_with(block_values + first, K // 2, tl.minimum(BLOCK_N, N - block * BLOCK_N), share, OVERLAP)
    from_values = values + column[:, None].to(tl.int64) * (K // 2) + at[None, :]
    from_x = x + row[None, :] * K + at[:, None]
    is_column, is_row = (column < N)[:, None], (row < M)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in range(part * each, tl.minimum((part + 1) * each, chunks)):
        bits = tl.load(from_values + chunk * HALF, mask=is_column, other=0, eviction_policy="evict_first")
        some = tl.load(from_x + chunk * CHUNK, mask=is_row, other=0.0)
        more = tl.load(from_x + chunk * CHUNK + HALF, mask=is_row, other=0.0)
        own = chunk * CHUNK // GROUP * N + column
        offset = tl.load(zero + own, mask=column < N, other=0).to(tl.float32)
        low, high = halves(bits, offset, some.dtype, PACKED)
        products = tl.dot(low, some, input_precision="ieee")
        products = tl.dot(high, more, products, input_precision="ieee")
        sums += products * tl.load(scale + own, mask=column < N, other=0.0).to(tl.float32)[:, None]
    place = row[None, :].to(tl.int64) * N + column[:, None]
    is_last = True
    if SPLIT > 1:
        sums, is_last = joined(sums, partial, finished, place, is_column & is_row, M * N, SPLIT)
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=column < N, other=0.0)[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_column & is_row)


@triton.jit
def dequantize(
    values: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Write the weights [N, K] as floats to ``out``; a program takes a chunk of BLOCK_N rows."""
    HALF: tl.constexpr = CHUNK // 2
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = (column < N)[:, None]
    rows = column[:, None].to(tl.int64)
    bits = tl.load(values + rows * (K // 2) + chunk * HALF + at[None, :], mask=inside, other=0)
    own = chunk * CHUNK // GROUP * N + column
    low, high = halves(bits, tl.load(zero + own, mask=column < N, other=0).to(tl.float32), tl.float32, False)
    factor = tl.load(scale + own, mask=column < N, other=0.0).to(tl.float32)[:, None]
    to = out + rows * K + chunk * CHUNK + at[None, :]
    tl.store(to, (low * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (high * factor).to(out.dtype.element_ty), mask=inside)
