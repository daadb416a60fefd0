"""Triton kernels for the work between matrix products, each in place of several kernels of torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, N: tl.constexpr, PADDED: tl.constexpr
) -> None:
    """Divide a row by the root of its mean square, round it to x's type and multiply it by ``weight``; one program per
    row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < N
    values = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    normed = (values * root).to(x.dtype.element_ty)
    tl.store(out + row * N + at, normed * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_rms_norm(
    x: tl.tensor,
    more: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Apply ``rms_norm`` to the rounded sum total = x + more."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < N
    place = row * N + at
    left = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + tl.load(more + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    normed = (values * root).to(x.dtype.element_ty)
    tl.store(out + place, normed * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def silu_gate(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute silu(gate) * up by rows of ``size``, with silu(gate) rounded before the product, as torch does.

    Rows need not be contiguous: one matrix product leaves the rows of ``gate`` and ``up`` side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    activated = (value * tl.sigmoid(value)).to(gate.dtype.element_ty)
    y = activated * tl.load(up + row * up_stride + at, mask=inside, other=0.0)
    tl.store(out + row * size + at, y, mask=inside)


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
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    at = token * (2 * HALF) + d
    cos_left, cos_right = tl.load(cos + at, mask=inside), tl.load(cos + at + HALF, mask=inside)
    sin_left, sin_right = tl.load(sin + at, mask=inside), tl.load(sin + at + HALF, mask=inside)
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < H)[:, None] & inside[None, :]
        source = q + token * q_token_stride + head[:, None] * q_head_stride + d[None, :]
        target = q_out + (token * H + head[:, None]) * (2 * HALF) + d[None, :]
        turn(source, target, cos_left, cos_right, sin_left, sin_right, mask, HALF)
    else:
        head = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        mask = (head < HKV)[:, None] & inside[None, :]
        source = k + token * k_token_stride + head[:, None] * k_head_stride + d[None, :]
        target = k_out + (token * HKV + head[:, None]) * (2 * HALF) + d[None, :]
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
