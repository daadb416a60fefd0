"""Triton kernels that add adapters to the rows of a step, each row by its own slot, in two launches a linear group.

::

    slots    [rows]                              the row's slot; slot 0 has no adapter
    tables   [slots, modules, 4]                 addresses of A [r, K], B transposed [r, N], gain and shift [N]; 0: none
    shrink   h [rows, members, splits, MAX_RANK] = x A^T, in parts of K
    expand   y += scale (sum of h) B^T; y = y gain + shift

Factors stay where they are: loading or evicting an adapter changes ``tables`` in place, and nothing that a CUDA graph
has recorded. A row's bits depend on its own input and adapter alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink(
    x: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    ranks: tl.tensor,
    h: tl.tensor,
    K: tl.tensor,
    first: tl.tensor,
    modules: tl.tensor,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiply RANK_BLOCK rows of a member's A by a row of x [rows, K], over SPLIT_K of K."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = MAX_RANK // RANK_BLOCK
    member = tl.program_id(1) // blocks
    lowest = (tl.program_id(1) % blocks) * RANK_BLOCK
    split = tl.program_id(2)
    at = tl.load(slots + row).to(tl.int64) * modules + first + member
    rank = tl.load(ranks + at)
    if lowest < rank:
        a = tl.multiple_of(tl.load(tables + at * 4).to(tl.pointer_type(x.dtype.element_ty)), 16)
        r = lowest + tl.arange(0, RANK_BLOCK)
        k = tl.arange(0, BLOCK_K)
        sums = tl.zeros((RANK_BLOCK, BLOCK_K), tl.float32)
        for start in range(split * SPLIT_K, tl.minimum(split * SPLIT_K + SPLIT_K, K), BLOCK_K):
            inside = start + k < K
            some = tl.load(x + row * K + start + k, mask=inside, other=0.0).to(tl.float32)
            mask = (r < rank)[:, None] & inside[None, :]
            sums += (
                tl.load(a + r[:, None] * K + start + k[None, :], mask=mask, other=0.0).to(tl.float32) * some[None, :]
            )
        tl.store(h + ((row * MEMBERS + member) * SPLITS + split) * MAX_RANK + r, tl.sum(sums, 1))


@triton.jit
def expand(
    h: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    ranks: tl.tensor,
    scales: tl.tensor,
    bounds: tl.tensor,
    y: tl.tensor,
    N: tl.tensor,
    first: tl.tensor,
    modules: tl.tensor,
    blocks: tl.tensor,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add to BLOCK_N columns of a member in a row of y [rows, N]. ``bounds`` [members, 2] has the members' columns."""
    row = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1) // blocks
    begin = tl.load(bounds + member * 2)
    size = tl.load(bounds + member * 2 + 1) - begin
    low_n = (tl.program_id(1) % blocks) * BLOCK_N
    at = tl.load(slots + row).to(tl.int64) * modules + first + member
    rank = tl.load(ranks + at)
    if (rank > 0) & (low_n < size):
        n = low_n + tl.arange(0, BLOCK_N)
        kind = y.dtype.element_ty
        b = tl.multiple_of(tl.load(tables + at * 4 + 1).to(tl.pointer_type(kind)), 16)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        for lowest in range(0, rank, RANK_BLOCK):
            r = lowest + tl.arange(0, RANK_BLOCK)
            low = tl.zeros((RANK_BLOCK,), tl.float32)
            for split in range(SPLITS):
                low += tl.load(h + ((row * MEMBERS + member) * SPLITS + split) * MAX_RANK + r, mask=r < rank, other=0.0)
            mask = (r < rank)[:, None] & (n < size)[None, :]
            weights = tl.load(b + r[:, None] * size + n[None, :], mask=mask, other=0.0).to(tl.float32)
            sums += tl.sum(weights * low[:, None], 0)
        place = y + row * N + begin + n
        total = tl.load(place, mask=n < size, other=0.0).to(tl.float32) + sums * tl.load(scales + at)
        gain = tl.load(tables + at * 4 + 2)
        if gain != 0:
            shift = tl.load(tables + at * 4 + 3).to(tl.pointer_type(kind))
            total = total * tl.load(gain.to(tl.pointer_type(kind)) + n, mask=n < size, other=0.0).to(tl.float32)
            total += tl.load(shift + n, mask=n < size, other=0.0).to(tl.float32)
        tl.store(place, total.to(kind), mask=n < size)
