"""Split-KV attention of single tokens with wide heads, or over latent keys whose first numbers are values, in Triton.

It does what ``decode_kernel.decode_split`` does and leaves the same for ``merge_splits``, with three differences::

    keys      D = MAIN_DIM + REST_DIM: a width that is no power of two is not padded to the next one (576 = 512 + 64)
    values    if SHARED, the keys' first MAIN_DIM numbers, which are read once
    heads     HEADS of a group to a program, so that groups of 128 heads fit
"""

from __future__ import annotations

import triton
import triton.language as tl


def sizes(*, shared: bool, half: bool) -> tuple[int, int]:
    """Return the tokens of a tile and the heads of a program, for latent keys and for types of 16 bits.

    The fastest of seven on an H100 that fit its shared memory, which has some tiles of keys and of values at once."""
    return (32 if half else 16), (32 if half and shared else 16)


@triton.jit
def decode_wide(
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
    HEADS: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN_PADDED: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    """Compute the partial softmaxes of splits, for HEADS heads of a group."""
    row = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // parts
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    member = (tl.program_id(1) % parts) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, MAIN_PADDED)
    rest = tl.arange(0, REST_PADDED)
    dv = tl.arange(0, DV_PADDED)
    is_head = member < GROUP
    head = row * (HKV * GROUP) + kv_head * GROUP + member
    query = tl.load(q + head[:, None] * D + d[None, :], mask=is_head[:, None] & (d < MAIN_DIM)[None, :], other=0.0)
    is_rest = is_head[:, None] & (rest < REST_DIM)[None, :]
    query_rest = tl.load(q + head[:, None] * D + MAIN_DIM + rest[None, :], mask=is_rest, other=0.0)
    for part in range(first // SPLIT + tl.program_id(2), (length + SPLIT - 1) // SPLIT, num_programs):
        start = tl.maximum(part * SPLIT, first)  # so that the first tile has a token in the window
        stop = tl.minimum(part * SPLIT + SPLIT, length)
        running_max = tl.full([HEADS], float("-inf"), tl.float32)
        exponentials = tl.zeros([HEADS], tl.float32)
        summed = tl.zeros([HEADS, DV_PADDED], tl.float32)
        for tile in range(start, stop, TILE):
            token = tile + tl.arange(0, TILE)
            inside = token < stop
            block = tl.load(block_tables + row * table_stride + token // BLOCK_SIZE, mask=inside, other=0)
            place = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * HKV + kv_head
            from_k = k + place[:, None] * D
            keys = tl.load(from_k + d[None, :], mask=inside[:, None] & (d < MAIN_DIM)[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if REST_DIM > 0:
                of_rest = inside[:, None] & (rest < REST_DIM)[None, :]
                keys_rest = tl.load(from_k + MAIN_DIM + rest[None, :], mask=of_rest, other=0.0)
                scores = tl.dot(query_rest, tl.trans(keys_rest), scores, input_precision="ieee")
            scores = scores * scaling
            if HAS_SOFTCAP:
                scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            rescale = tl.exp(running_max - new_max)
            weights = tl.exp(scores - new_max[:, None])
            if SHARED:
                values = keys
            else:
                is_value = inside[:, None] & (dv < DV)[None, :]
                values = tl.load(v + place[:, None] * DV + dv[None, :], mask=is_value, other=0.0)
            exponentials = exponentials * rescale + tl.sum(weights, 1)
            summed = summed * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            running_max = new_max
        at = head * num_splits + part
        tl.store(sums + at[:, None] * DV + dv[None, :], summed, mask=is_head[:, None] & (dv < DV)[None, :])
        tl.store(largest + at, running_max, mask=is_head)
        tl.store(total + at, exponentials, mask=is_head)
