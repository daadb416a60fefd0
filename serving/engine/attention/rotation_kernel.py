"""The Triton kernel of rotary embeddings. It must be compiled without fused multiply-adds (``rotation.UNFUSED``)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    q_head_stride: tl.tensor,
    q_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate the halves of queries and keys [T, heads, 2 * HALF] against each other. Each product and each sum is
    rounded to their type, as torch does it. A program takes HEADS heads of a token; those of queries come first."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < q_parts:
        turn_heads(
            q, q_out, cos, sin, token, token, part * HEADS, q_head_stride, q_token_stride, H, HALF, HALF_PADDED, HEADS
        )
    else:
        head = (part - q_parts) * HEADS
        turn_heads(k, k_out, cos, sin, token, token, head, k_head_stride, k_token_stride, HKV, HALF, HALF_PADDED, HEADS)


@triton.jit
def turn_heads(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate HEADS of a token's H heads from ``first`` on and write them to ``place`` of out [places, H, 2 * HALF]."""
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    at = token * (2 * HALF) + d
    cos_left, cos_right = tl.load(cos + at, mask=inside), tl.load(cos + at + HALF, mask=inside)
    sin_left, sin_right = tl.load(sin + at, mask=inside), tl.load(sin + at + HALF, mask=inside)
    head = first + tl.arange(0, HEADS)
    mask = (head < H)[:, None] & inside[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + d[None, :]
    target = out + (place * H + head[:, None]) * (2 * HALF) + d[None, :]
    turn(source, target, cos_left, cos_right, sin_left, sin_right, mask, HALF)


@triton.jit
def turn(
    source: tl.tensor,
    target: tl.tensor,
    cos_left: tl.tensor,
    cos_right: tl.tensor,
    sin_left: tl.tensor,
    sin_right: tl.tensor,
    mask: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Write x * cos + (-right, left) * sin of some heads."""
    kind = target.dtype.element_ty
    left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    first = (left * cos_left.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    second = (right * sin_left.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    tl.store(target, (first - second).to(kind), mask=mask)
    first = (right * cos_right.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    second = (left * sin_right.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    tl.store(target + HALF, (first + second).to(kind), mask=mask)
