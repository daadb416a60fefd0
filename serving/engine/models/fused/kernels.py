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
