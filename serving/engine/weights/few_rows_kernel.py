"""Triton kernels for few rows times weights in 16 bits or float32, which take as long as reading the weights.

As in ``fp8_kernel.py``, weights are the left operand of matrix units, and long sums are split into parts that are added
in order. One row alone is multiplied without matrix units, by programs of few weights."""

from __future__ import annotations

import triton
import triton.language as tl

from ..devices.overlap_kernel import begin_with
from .fp8_kernel import joined


@triton.jit(do_not_specialize=["M", "SPLIT", "fetched"])
def multiply(
    x: tl.tensor,
    weight: tl.tensor,
    tiles: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    finished: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    SPLIT: tl.tensor,
    fetched: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    IN_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply x [M, K] by ``weight`` [N, K] → out [M, N], with sums in float32. M is at most BLOCK_M; a program takes
    BLOCK_N rows of ``weight``, and one of SPLIT parts of K. ``WHOLE_K``: BLOCK_K divides K. ``finished`` [blocks of N]
    is zeros before and after. With IN_TILES, ``tiles`` describes ``weight`` in blocks. ``fetched`` is how many
    weights of each row a program fetches before it waits (``overlap_kernel.py``)."""
    block, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = part * each
    num_fetched = tl.minimum(tl.minimum(each, K - first), fetched)
    begin_with(
        weight + block.to(tl.int64) * BLOCK_N * K + first,
        K,
        tl.minimum(BLOCK_N, N - block * BLOCK_N),
        num_fetched,
        OVERLAP,
    )
    from_weight = weight + column[:, None].to(tl.int64) * K + at[None, :]
    from_x = x + row[None, :] * K + at[:, None]
    is_column, is_row = (column < N)[:, None], (row < M)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, tl.minimum(first + each, K), BLOCK_K):
        if WHOLE_K:
            if IN_TILES:
                some = tiles.load([block * BLOCK_N, start])
            else:
                some = tl.load(from_weight + start, mask=is_column, other=0.0, eviction_policy="evict_first")
            rows = tl.load(from_x + start, mask=is_row, other=0.0)
        else:
            inside = start + at < K
            some = tl.load(from_weight + start, mask=is_column & inside[None, :], other=0.0)
            rows = tl.load(from_x + start, mask=is_row & inside[:, None], other=0.0)
        sums = tl.dot(some, rows, sums, input_precision="ieee")
    place = row[None, :].to(tl.int64) * N + column[:, None]
    is_last = True
    if IN_PARTS:
        sums, is_last = joined(sums, partial, finished, place, is_column & is_row, M * N, SPLIT)
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_column & is_row)


@triton.jit(do_not_specialize=["fetched"])
def multiply_row(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    fetched: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply one row x [K] by ``weight`` [N, K] → out [N], in float32. A program takes BLOCK_N rows of ``weight``,
    whole. ``fetched`` is as above."""
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    begin_with(
        weight + block.to(tl.int64) * BLOCK_N * K,
        K,
        tl.minimum(BLOCK_N, N - block * BLOCK_N),
        tl.minimum(K, fetched),
        OVERLAP,
    )
    from_weight = weight + column[:, None].to(tl.int64) * K + at[None, :]
    is_column = (column < N)[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            some = tl.load(from_weight + start, mask=is_column, other=0.0, eviction_policy="evict_first")
            row = tl.load(x + start + at)
        else:
            inside = start + at < K
            some = tl.load(from_weight + start, mask=is_column & inside[None, :], other=0.0)
            row = tl.load(x + start + at, mask=inside, other=0.0)
        sums += some.to(tl.float32) * row.to(tl.float32)[None, :]
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < N)
