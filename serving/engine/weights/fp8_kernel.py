"""A Triton kernel for few rows times float8 (e4m3fn) weights, which are read as bytes and are floats in registers only.

The weights are the left operand: a program computes [BLOCK_N, BLOCK_M] = values [BLOCK_N, K'] times x^T [K', BLOCK_M],
so that tensor cores, which want 64 rows on the left, are filled by weights and not by padding. Where N has too few
blocks to occupy a device, K is split over SPLIT programs::

    values   N ─┐ BLOCK_N     K ── SPLIT parts ──          partial [SPLIT, M, N] float32
                │             part 0 │ part 1 │ …    ──→   added in order by the program that finishes last

One row alone is multiplied without tensor cores, by programs of few weights, which read faster.

Only the counter of finished programs is atomic, so sums have the same bits in every run. The parts of K are the same
for any number of rows.

A byte is converted by moving its bits, exactly, on every device; ``DECODE`` says to what and by what::

    e4m3fn     s eeee mmm                    exponent's bias 7
    float16    s 0eeee mmm0000000            bias 15: 1/256 of the value, subnormal if the byte is      "shift"
    bfloat16   s 0000eeee mmm0000            bias 127: 2^-120 of it, multiplied by 2^120, 4 bytes       "packed"
               at once, from compute capability 8.0 on
    any        by the device's own instructions, from compute capability 8.9 on                         "native"
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..devices.overlap_kernel import begin_with

# Bytes 0 and 1, then 2 and 3, into the upper halves of two pairs of 16 bits; then sign | exponent and mantissa moved
# down by 4; then times 2^120 (0x7b80), plus -0.
TO_BF16 = tl.constexpr("""{
.reg .b32 a<2>, b<2>, by, zero;
mov.b32 by, 0x7b807b80;
mov.b32 zero, 0x80008000;
prmt.b32 a0, 0, $2, 0x5040;
prmt.b32 a1, 0, $2, 0x7060;
and.b32 b0, a0, 0x7f007f00;
and.b32 b1, a1, 0x7f007f00;
shr.b32 b0, b0, 4;
shr.b32 b1, b1, 4;
lop3.b32 b0, b0, 0x80008000, a0, 0xf8;
lop3.b32 b1, b1, 0x80008000, a1, 0xf8;
fma.rn.bf16x2 $0, b0, by, zero;
fma.rn.bf16x2 $1, b1, by, zero;
}""")


@triton.jit
def decoded(bits: tl.tensor, dtype: tl.constexpr, DECODE: tl.constexpr) -> tl.tensor:
    """Convert bytes of e4m3fn to ``dtype``; by "shift", to 1/256 of their values."""
    if DECODE == "packed":
        return tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
    if DECODE == "native":
        return bits.to(tl.float8e4nv, bitcast=True).to(dtype)
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def joined(
    sums: tl.tensor,
    partial: tl.tensor,
    finished: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    size: tl.tensor,
    SPLIT: tl.tensor,
) -> tl.tensor:
    """Return the ``sums`` of all programs that share program 0's axis, in the one that finishes last; and whether this
    is it. ``partial`` has room for SPLIT times ``size``, and each program's sums go to ``place`` in its part."""
    block, part = tl.program_id(0), tl.program_id(1)
    tl.store(partial + part.to(tl.int64) * size + place, sums, mask=inside)
    tl.debug_barrier()  # every thread's sums are written before one thread counts
    is_last = tl.atomic_add(finished + block, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        sums = tl.zeros_like(sums)
        from_partial = partial + place
        for _ in range(SPLIT):
            sums += tl.load(from_partial, mask=inside, other=0.0, cache_modifier=".cg")
            from_partial += size
        tl.store(finished + block, 0)
    return sums, is_last


@triton.jit(do_not_specialize=["M", "fetched"])
def multiply(
    x: tl.tensor,
    values: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
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
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    DECODE: tl.constexpr,
    IN_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply x [M, K] by ``values``, uint8 [N, K], → out [M, N]. M is at most BLOCK_M; a program takes BLOCK_N rows
    of ``values``, and with ``SPLIT`` one part of K. Products have x's type; sums, ``scale`` and ``bias`` [N] are
    float32. ``WHOLE_K``: BLOCK_K divides K. ``finished`` [blocks of N] is zeros before and after.
    ``fetched`` is how many weights of each row a program fetches before it waits (``overlap_kernel.py``)."""
    block, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = part * each
    share = tl.minimum(tl.minimum(each, K - first), fetched)
    block_values = values + block.to(tl.int64) * BLOCK_N * K
    begin_with(block_values + first, K, tl.minimum(BLOCK_N, N - block * BLOCK_N), share, OVERLAP)
    from_values = values + column[:, None].to(tl.int64) * K + at[None, :]
    from_x = x + row[None, :] * K + at[:, None]
    is_column, is_row = (column < N)[:, None], (row < M)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, tl.minimum(first + each, K), BLOCK_K):
        if WHOLE_K:
            if IN_TILES:
                bits = tiles.load([block * BLOCK_N, start])
            else:
                bits = tl.load(from_values + start, mask=is_column, other=0, eviction_policy="evict_first")
            some = tl.load(from_x + start, mask=is_row, other=0.0)
        else:
            inside = start + at < K
            bits = tl.load(from_values + start, mask=is_column & inside[None, :], other=0)
            some = tl.load(from_x + start, mask=is_row & inside[:, None], other=0.0)
        sums = tl.dot(decoded(bits, some.dtype, DECODE), some, sums, input_precision="ieee")
    place = row[None, :].to(tl.int64) * N + column[:, None]
    is_last = True
    if SPLIT > 1:
        sums, is_last = joined(sums, partial, finished, place, is_column & is_row, M * N, SPLIT)
    if is_last:
        factor = tl.load(scale + column, mask=column < N, other=0.0)
        if DECODE == "shift":
            factor *= 256.0
        y = sums * factor[:, None]
        if HAS_BIAS:
            y += tl.load(bias + column, mask=column < N, other=0.0)[:, None]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_column & is_row)


@triton.jit(do_not_specialize=["fetched"])
def multiply_row(
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    fetched: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    DECODE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply one row x [K] by ``values``, uint8 [N, K], → out [N], in float32. A program takes BLOCK_N rows of
    ``values``, whole. ``fetched`` is as above."""
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    block_values = values + block.to(tl.int64) * BLOCK_N * K
    begin_with(block_values, K, tl.minimum(BLOCK_N, N - block * BLOCK_N), tl.minimum(K, fetched), OVERLAP)
    from_values = values + column[:, None].to(tl.int64) * K + at[None, :]
    is_column = (column < N)[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            bits = tl.load(from_values + start, mask=is_column, other=0, eviction_policy="evict_first")
            some = tl.load(x + start + at)
        else:
            inside = start + at < K
            bits = tl.load(from_values + start, mask=is_column & inside[None, :], other=0)
            some = tl.load(x + start + at, mask=inside, other=0.0)
        sums += decoded(bits, some.dtype, DECODE).to(tl.float32) * some.to(tl.float32)[None, :]
    factor = tl.load(scale + column, mask=column < N, other=0.0)
    if DECODE == "shift":
        factor *= 256.0
    y = tl.sum(sums, 1) * factor
    if HAS_BIAS:
        y += tl.load(bias + column, mask=column < N, other=0.0)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < N)
