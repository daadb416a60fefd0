"""The write of a step's keys and values into their blocks, in Triton: one launch a layer."""

from __future__ import annotations

import triton
import triton.language as tl


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
