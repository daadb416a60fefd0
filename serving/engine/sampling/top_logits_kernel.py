"""The largest logits of every row, in Triton: candidates are found by a bound, and only they are sorted.

::

    row        ───── part ───── part ───── part ─────      the largest of each part
    bound      the count-th largest of these: at least so many logits are not below it, and rarely many more
    keys       the logits that are not below it, each with its token
    sorted     the count largest, the first of equals

A row with more candidates than there is room for, as many of one part or equals, is searched one logit at a time."""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))
LARGEST: tl.constexpr = tl.constexpr((1 << 63) - 1)
LAST: tl.constexpr = tl.constexpr((1 << 31) - 1)


@triton.jit
def key_of(value: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return int64 numbers in the order of float32 ``value``; of equals, the first ``token`` has the largest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # minus 0 equals 0
    ordered = tl.where(bits >= 0, bits, bits ^ LAST)
    return (ordered.to(tl.int64) << 32) | (-token + LAST).to(tl.int64)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered >= 0, ordered, ordered ^ LAST).to(tl.float32, bitcast=True)


@triton.jit
def token_of(key: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Return the token of a key; one of the row, if it is of none."""
    return tl.minimum((-(key & LAST) + LAST).to(tl.int32), size - 1).to(tl.int64)


@triton.jit
def largest_of_parts(
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Find the largest of each of PARTS parts of a block, ``maxima`` [B, blocks, PARTS], and the sum of exp(logit - the
    largest of the block), [B, blocks]: not finite if a logit is not, 0 if all are minus infinity.

    Neighbours are in different parts, since what is likely is often side by side."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    part = tl.arange(0, PARTS)
    token = block * (PART * PARTS) + tl.arange(0, PART)[:, None] * PARTS + part[None, :]
    value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    top = tl.max(best, 0)
    place = row * tl.num_programs(1) + block
    tl.store(maxima + place * PARTS + part, best)
    total = tl.sum(tl.sum(tl.where(value == float("-inf"), 0.0, tl.exp(value - top)), 0), 0)
    tl.store(sums + place, total)


@triton.jit(do_not_specialize=["count"])
def bound_of_row(
    maxima: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    bounds: tl.tensor,
    found: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Find the ``count``-th largest of a row's parts, and the log of the sum of all exp(logit): NaN if a logit is not
    finite or all are minus infinity."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    mask = place < blocks * PARTS
    best = tl.load(maxima + row * blocks * PARTS + place, mask=mask, other=float("-inf"))
    top = tl.max(best, 0)
    ordered = tl.sort(best, descending=True)
    tl.store(bounds + row, tl.max(tl.where(place == count - 1, ordered, float("-inf")), 0))
    tl.store(found + row, 0)
    of_block = tl.max(tl.reshape(best, (PADDED // PARTS, PARTS)), 1)
    block = tl.arange(0, PADDED // PARTS)
    total = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    whole = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(of_block - top)), 0)
    is_finite = (top > float("-inf")) & (top < float("inf")) & (whole < float("inf"))
    tl.store(totals + row, tl.where(is_finite, top + tl.log(whole), float("nan")))


@triton.jit
def candidates(
    logits: tl.tensor,
    bounds: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Append the keys of a block's logits from the row's bound on to ``keys`` [B, ROOM], in any order, and count them
    in ``found``."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    is_one = (value >= tl.load(bounds + row)) & (value > float("-inf"))
    number = tl.sum(is_one.to(tl.int32), 0)
    if number > 0:
        place = tl.atomic_add(found + row, number) + tl.cumsum(is_one.to(tl.int32), 0) - 1
        tl.store(keys + row * ROOM + place, key_of(value, token), mask=is_one & (place < ROOM))


@triton.jit(do_not_specialize=["count"])
def sort_candidates(
    logits: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    count: tl.tensor,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the ``count`` largest logits of a row, ``values`` float32 and ``ids`` int64 [B, count], in descending
    order."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROOM)
    number = tl.load(found + row)
    key = tl.load(keys + row * ROOM + place, mask=place < number, other=NOTHING)
    if number > ROOM:
        key = place.to(tl.int64) * 0 + NOTHING
        last = number.to(tl.int64) * 0 + LARGEST
        for i in range(count):
            best = tl.max(key, 0) * 0 + NOTHING
            for first in range(0, size, BLOCK):
                token = first + tl.arange(0, BLOCK)
                value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
                own = key_of(value, token)
                own = tl.where((own < last) & (value > float("-inf")), own, NOTHING)
                best = tl.maximum(best, tl.max(own, 0))
            key = tl.where(place == i, best, key)
            last = best
    key = tl.sort(key, descending=True)
    mask = place < count
    is_key = key > NOTHING
    tl.store(values + row * count + place, tl.where(is_key, value_of(key), float("-inf")), mask=mask)
    tl.store(ids + row * count + place, token_of(key, size), mask=mask)
