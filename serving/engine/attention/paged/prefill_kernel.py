"""Causal attention of prompt chunks over block tables, in Triton: one launch for all chunks of a step.

::

    chunk      | tile of queries | tile | ..      a program: the queries of a tile, for the heads that share a KV head
    keys       | TILE | TILE | ..                 from the first that the tile sees, at multiples of TILE

The rows of a program are (token, head of the group) pairs, so keys and values are read once for a whole group. Tiles of
keys begin at multiples of TILE, and one that a row does not see changes nothing of it: its bits do not depend on how
its prompt was cut into chunks, nor on the rest of the batch."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    begins: tl.tensor,
    block_tables: tl.tensor,
    lengths: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Attend the queries of one tile of a chunk. ``window`` 0 means none; chunk ``i`` has the tokens
    [``begins[i]``, ``begins[i + 1]``) of q and out, the last of ``lengths[i]`` of its sequence."""
    TOKENS: tl.constexpr = ROWS // GROUP
    chunk = tl.program_id(1)
    kv_head = tl.program_id(2)
    begin = tl.load(begins + chunk)
    size = tl.load(begins + chunk + 1) - begin
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # the tiles that read most come first
    if first >= size:
        return
    length = tl.load(lengths + chunk)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row // GROUP < TOKENS) & (token < size)
    position = length - size + token
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    at = (begin + token).to(tl.int64)
    query = tl.load(
        q + (at * q_token_stride + head * q_head_stride)[:, None] + d[None, :],
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
    )
    start = length - size + first
    seen = tl.where(window > 0, tl.maximum(start - window + 1, 0), 0)  # by the tile's first token
    stop = tl.minimum(start + TOKENS, length)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    exponentials = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DV_PADDED], tl.float32)
    factor = LOG2_E if HAS_SOFTCAP else scaling * LOG2_E
    table = block_tables + chunk * table_stride
    begin_masked = tl.where(window > 0, seen, start + 1) // TILE * TILE  # every row sees the whole of earlier tiles
    for tile in range(seen // TILE * TILE, begin_masked, TILE):
        running_max, exponentials, summed = fold(
            query, k, v, table, tile, stop, position, kv_head, running_max, exponentials, summed, scaling, softcap,
            window, factor, HKV, D, DV, BLOCK_SIZE, TILE, HAS_SOFTCAP, D_PADDED, DV_PADDED, False,
        )  # fmt: skip
    for tile in range(begin_masked, stop, TILE):
        running_max, exponentials, summed = fold(
            query, k, v, table, tile, stop, position, kv_head, running_max, exponentials, summed, scaling, softcap,
            window, factor, HKV, D, DV, BLOCK_SIZE, TILE, HAS_SOFTCAP, D_PADDED, DV_PADDED, True,
        )  # fmt: skip
    if HAS_SINKS:  # a score that takes its share of the softmax but has no value
        sink = tl.load(sinks + head) * LOG2_E
        largest = running_max * factor
        new_max = tl.maximum(largest, sink)
        rescale = tl.exp2(largest - new_max)
        exponentials = exponentials * rescale + tl.exp2(sink - new_max)
        summed = summed * rescale[:, None]
    exponentials = tl.where(exponentials > 0, exponentials, 1.0)  # of rows that stand for no token, and see none
    result = (summed / exponentials[:, None]).to(out.dtype.element_ty)
    place_out = (at * (HKV * GROUP) + head)[:, None] * DV + dv[None, :]
    tl.store(out + place_out, result, mask=valid[:, None] & (dv < DV)[None, :])


@triton.jit
def fold(
    query: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    stop: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    running_max: tl.tensor,
    exponentials: tl.tensor,
    summed: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    factor: tl.tensor,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Add a tile of keys to the running softmax. Exponents are scores times ``factor``, of base 2.

    Without MASKED every row sees all of the tile. Its numbers are the same either way, since what they are made of is
    fused explicitly."""
    key = tile + tl.arange(0, TILE)
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    inside = key < stop if MASKED else tl.full([TILE], True, tl.int1)
    block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
    place = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * HKV + kv_head
    keys = tl.load(k + place[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
    scores = tl.dot(query, keys, input_precision="ieee")
    if HAS_SOFTCAP:
        scores = (2.0 * tl.sigmoid(2.0 * (scores * scaling) / softcap) - 1.0) * softcap
    if MASKED:
        visible = key[None, :] <= position[:, None]
        visible &= (window <= 0) | (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # of a row that has seen nothing yet
    rescale = tl.exp2((running_max - base) * factor)  # exactly 1 if a row sees nothing of the tile
    weights = tl.exp2(tl.fma(scores, factor, -(base * factor)[:, None]))
    values = tl.load(v + place[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
    exponentials = tl.fma(exponentials, rescale, tl.sum(weights, 1))
    summed = tl.dot(weights.to(values.dtype), values, summed * rescale[:, None], input_precision="ieee")
    return new_max, exponentials, summed
