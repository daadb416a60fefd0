"""Triton kernels for the work between matrix products, each in place of several kernels of torch."""

from __future__ import annotations

import triton
import triton.language as tl

from ...devices.overlap_kernel import begin
from ...weights.fp8_rows_kernel import codes, scale_of


@triton.jit
def quantize_row(
    y: tl.tensor, q: tl.tensor, q_scale: tl.tensor, row: tl.tensor, at: tl.tensor, size: tl.tensor
) -> None:
    """Write a row of ``size`` values y in float8 and its scale (``fp8_rows_kernel.py``). Beyond the row y is 0."""
    values = y.to(tl.float32)
    own = scale_of(tl.max(tl.abs(values), 0))
    tl.store(q_scale + row, own)
    tl.store(q + row * size + at, codes(values, own), mask=at < size)


@triton.jit
def write_normed(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    """Do what ``rms_norm`` does with the values x of a row."""
    values = x.to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    y = ((values * root).to(x.dtype) * tl.load(weight + at, mask=inside, other=0.0)).to(out.dtype.element_ty)
    tl.store(out + row * N + at, y, mask=inside)
    if QUANTIZE:
        quantize_row(y, q, q_scale, row, at, N)


@triton.jit
def rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Divide a row by the root of its mean square, round it to x's type and multiply it by ``weight``; one program per
    row. With QUANTIZE the result is also written in float8."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < N
    values = tl.load(x + row * N + at, mask=inside, other=0.0)
    write_normed(values, weight, out, q, q_scale, row, at, inside, eps, N, QUANTIZE)


@triton.jit
def add_rms_norm(
    x: tl.tensor,
    more: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Apply ``rms_norm`` to the rounded sum total = x + more."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < N
    place = row * N + at
    left = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + tl.load(more + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    write_normed(rounded, weight, out, q, q_scale, row, at, inside, eps, N, QUANTIZE)


@triton.jit
def silu_gate(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    size: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Compute silu(gate) * up by rows of ``size``, with silu(gate) rounded before the product, as torch does.

    Rows need not be contiguous: one matrix product leaves the rows of ``gate`` and ``up`` side by side. With QUANTIZE a
    block is a whole row, and the result is also written in float8."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    activated = (value * tl.sigmoid(value)).to(gate.dtype.element_ty)
    y = (activated * tl.load(up + row * up_stride + at, mask=inside, other=0.0)).to(out.dtype.element_ty)
    tl.store(out + row * size + at, y, mask=inside)
    if QUANTIZE:
        quantize_row(y, q, q_scale, row, at, size)
