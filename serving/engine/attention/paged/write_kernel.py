"""The write of a step's keys and values into their blocks, in Triton: one launch a layer, rotary embeddings included
where the layer has them."""

from __future__ import annotations

import triton
import triton.language as tl

from ...devices.overlap_kernel import begin
from ..rotation_kernel import turn_heads


@triton.jit
def write_kv(
    k: tl.tensor,
    v: tl.tensor,
    k_blocks: tl.tensor,
    v_blocks: tl.tensor,
    indexes: tl.tensor,
    k_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HKV_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
) -> None:
    """Copy keys and values [Hkv, T, D] of one token to place ``indexes[token]`` of blocks [places, Hkv, D]."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(indexes + token)
    head = tl.arange(0, HKV_PADDED)[:, None]
    d = tl.arange(0, D_PADDED)[None, :]
    mask = (head < HKV) & (d < D)
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=mask)
    tl.store(k_blocks + (place * HKV + head) * D + d, keys, mask=mask)
    d = tl.arange(0, DV_PADDED)[None, :]
    mask = (head < HKV) & (d < DV)
    values = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=mask)
    tl.store(v_blocks + (place * HKV + head) * DV + d, values, mask=mask)


@triton.jit
def rotate_and_write(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_blocks: tl.tensor,
    v_blocks: tl.tensor,
    indexes: tl.tensor,
    q_head_stride: tl.tensor,
    q_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    DV: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Do what ``rotate`` does, with keys written to place ``indexes[token]`` of blocks [places, Hkv, 2 * HALF], and
    values beside them. A program takes HEADS heads of a token; those of queries come first."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < q_parts:
        turn_heads(
            q, q_out, cos, sin, token, token, part * HEADS, q_head_stride, q_token_stride, H, HALF, HALF_PADDED, HEADS
        )
    else:
        place = tl.load(indexes + token)
        first = (part - q_parts) * HEADS
        turn_heads(
            k, k_blocks, cos, sin, token, place, first, k_head_stride, k_token_stride, HKV, HALF, HALF_PADDED, HEADS
        )
        head = first + tl.arange(0, HEADS)
        dv = tl.arange(0, DV_PADDED)
        wanted = (head < HKV)[:, None] & (dv < DV)[None, :]
        values = tl.load(v + token * v_token_stride + head[:, None] * v_head_stride + dv[None, :], mask=wanted)
        tl.store(v_blocks + (place * HKV + head[:, None]) * DV + dv[None, :], values, mask=wanted)
