"""The largest logits of every row, in Triton: those of each block, of which the largest of all are found among few."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def top_of_block(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the ``count`` largest logits of a block, in descending order, and the sum of exp(logit - the largest).

    ``values`` and ``ids`` are [B, blocks, count], ``sums`` [B, blocks]; a sum is not finite if a logit is not, 0 if all
    are minus infinity."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    here = tl.arange(0, BLOCK)
    token = block * BLOCK + here
    value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    best, at = tl.max(value, 0, return_indices=True)
    total = tl.sum(tl.where(value == float("-inf"), 0.0, tl.exp(value - best)), 0)
    place = row * tl.num_programs(1) + block
    tl.store(sums + place, total)
    for i in range(count):
        tl.store(values + place * count + i, best)
        tl.store(ids + place * count + i, tl.minimum(block * BLOCK + at, size - 1).to(tl.int64))
        value = tl.where(here == at, float("-inf"), value)
        best, at = tl.max(value, 0, return_indices=True)


@triton.jit(do_not_specialize=["count"])
def total_of_row(
    values: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Find the log of the sum of all exp(logit) of a row; NaN if a logit is not finite or all are minus infinity."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    mask = block < blocks
    value = tl.load(values + (row * blocks + block) * count, mask=mask, other=float("-inf"))
    total = tl.load(sums + row * blocks + block, mask=mask, other=0.0)
    found = tl.max(value, 0)
    whole = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(value - found)), 0)
    is_finite = (found > float("-inf")) & (found < float("inf")) & (whole < float("inf"))
    tl.store(totals + row, tl.where(is_finite, found + tl.log(whole), float("nan")))
