"""Triton kernels for the largest of a row: first of each part of it, then of the parts."""

from __future__ import annotations

import triton
import triton.language as tl

from ..devices.overlap_kernel import begin


@triton.jit
def largest_of_chunk(
    logits: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Find the largest of BLOCK tokens, the first of equals. What is no number counts as infinity."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    best, place = tl.max(value, 0, return_indices=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(values + at, best)
    tl.store(places + at, chunk * BLOCK + place)


@triton.jit
def largest_of_row(
    values: tl.tensor,
    places: tl.tensor,
    tokens: tl.tensor,
    chunks: tl.tensor,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Find the largest of a row's chunks; -1 if it is infinite."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    value = tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    best, first = tl.max(value, 0, return_indices=True)
    token = tl.load(places + row * chunks + first).to(tl.int64)
    is_finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, token, -1))
