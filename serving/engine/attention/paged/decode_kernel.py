"""Split-KV attention of single tokens over block tables (flash-decoding; Dao et al. 2023), in Triton.

::

    decode_split    one program per (row, KV head, split): running softmax over the split's tokens, TILE at a time; all
                    heads of a group share what is read. Writes sums [Dv], the maximum score and the exponentials' sum
    merge_splits    one program per (row, head): the splits, PARTS at a time, and the sink

Splits begin at multiples of SPLIT whatever else is computed, so a row's bits depend on its own sequence alone."""

from __future__ import annotations

import triton
import triton.language as tl

from ...devices.overlap_kernel import begin

TILE = 64  # tokens
PARTS: tl.constexpr = tl.constexpr(8)  # splits that are read together


def padded(width: int) -> int:
    """Return the power of two, at least 16, that matrix units take."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def decode_split(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    block_tables: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    num_programs: tl.tensor,
    num_splits: tl.tensor,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Compute the partial softmaxes of splits. ``window`` 0 means none. A program takes every ``num_programs``-th
    split, so the grid need not fit the lengths."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    member = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    is_head = member < GROUP
    head = row * (HKV * GROUP) + kv_head * GROUP + member
    query = tl.load(q + head[:, None] * D + d[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    for part in range(first // SPLIT + tl.program_id(2), (length + SPLIT - 1) // SPLIT, num_programs):
        start = tl.maximum(part * SPLIT, first)  # so that the first tile has a token in the window
        stop = tl.minimum(part * SPLIT + SPLIT, length)
        running_max = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        exponentials = tl.zeros([GROUP_PADDED], tl.float32)
        summed = tl.zeros([GROUP_PADDED, DV_PADDED], tl.float32)
        for tile in range(start, stop, TILE):
            token = tile + tl.arange(0, TILE)
            inside = token < stop
            block = tl.load(block_tables + row * table_stride + token // BLOCK_SIZE, mask=inside, other=0)
            place = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * HKV + kv_head
            keys = tl.load(k + place[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
            scores = tl.dot(query, keys, input_precision="ieee") * scaling
            if HAS_SOFTCAP:
                scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            rescale = tl.exp(running_max - new_max)
            weights = tl.exp(scores - new_max[:, None])
            values = tl.load(
                v + place[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0
            )
            exponentials = exponentials * rescale + tl.sum(weights, 1)
            summed = summed * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            running_max = new_max
        at = head * num_splits + part
        tl.store(sums + at[:, None] * DV + dv[None, :], summed, mask=is_head[:, None] & (dv < DV)[None, :])
        tl.store(largest + at, running_max, mask=is_head)
        tl.store(total + at, exponentials, mask=is_head)


@triton.jit
def merge_splits(
    sums: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    H: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DV_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Merge the partial softmaxes of a row's splits, PARTS at a time and these in order, and divide by their sum."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    dv = tl.arange(0, DV_PADDED)
    at = (row * H + head) * num_splits
    lowest, end = first // SPLIT, (length + SPLIT - 1) // SPLIT
    place = tl.arange(0, PARTS)
    running_max = tl.full([PARTS], float("-inf"), tl.float32)
    for part in range(lowest, end, PARTS):
        inside = part + place < end
        running_max = tl.maximum(running_max, tl.load(largest + at + part + place, mask=inside, other=float("-inf")))
    overall = tl.max(running_max, 0)
    exponentials = overall - overall  # also NaN if that is what a split has
    if HAS_SINKS:  # a score that takes its share of the softmax but has no value
        sink = tl.load(sinks + head)
        overall = tl.maximum(overall, sink)
        exponentials = tl.exp(sink - overall)
    summed = tl.zeros([DV_PADDED], tl.float32)
    for part in range(lowest, end, PARTS):
        inside = part + place < end
        factor = tl.exp(tl.load(largest + at + part + place, mask=inside, other=float("-inf")) - overall)
        exponentials += tl.sum(tl.load(total + at + part + place, mask=inside, other=0.0) * factor, 0)
        numbers = sums + (at + part + place)[:, None] * DV + dv[None, :]
        values = tl.load(numbers, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        summed += tl.sum(values * factor[:, None], 0)
    tl.store(out + (row * H + head) * DV + dv, (summed / exponentials).to(out.dtype.element_ty), mask=dv < DV)
