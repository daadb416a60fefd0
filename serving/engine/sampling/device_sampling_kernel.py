"""Triton kernels for exponential times by (seed, position, token), and for their race.

The bits are numpy's Philox 4x64 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by seed and position::

    counter   1                  2                  …
    words     w0  w1  w2  w3     w0  w1  w2  w3          64 bits each
    tokens    0 1 2 3 4 5 6 7    8 9 …                   32 bits each, the lower half first
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return 32 random bits for each ``token``; ``seed`` and ``position`` are uint64 scalars."""
    nothing = (token * 0).to(tl.uint64)
    c0 = (token // 8 + 1).to(tl.uint64)
    c1 = nothing
    c2 = nothing
    c3 = nothing
    k0 = nothing + seed
    k1 = nothing + position
    m0 = nothing + 0xD2E7470EE14C6C93
    m1 = nothing + 0xCA5A826395121157
    w0 = nothing + 0x9E3779B97F4A7C15
    w1 = nothing + 0xBB67AE8584CAA73B
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        low0 = m0 * c0
        high1 = tl.umulhi(m1, c2)
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    word = (token % 8) // 2
    chosen = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    half = tl.where(token % 2 == 0, chosen, chosen >> 32)
    return (half & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def time_of(random: tl.tensor) -> tl.tensor:
    """Compute -log1p(-u) for u in (0, 1), exact near zero: log(w) u / (w - 1), with w the rounded 1 - u (Kahan)."""
    u = tl.minimum((random.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    w = 1.0 - u
    divisor = tl.where(w == 1.0, -1.0, w - 1.0)
    return tl.where(w == 1.0, u, tl.log(w) * u / divisor)


@triton.jit
def exponentials(keys: tl.tensor, times: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    tl.store(times + row * size + token, time_of(bits(seed, position, token)), mask=token < size)


@triton.jit
def race(
    logits: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    floors: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the first of a program's tokens to arrive: that with the largest logit / temperature - log(time)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    logit = tl.load(logits + row * size + token, mask=token < size, other=float("-inf")) * tl.load(scales + row)
    arrival = logit - tl.log(time_of(bits(seed, position, token)))
    arrival = tl.where(logit < tl.load(floors + row), float("-inf"), arrival)
    place = row * tl.num_programs(1) + chunk
    tl.store(scores + place, tl.max(arrival, 0))
    tl.store(winners + place, (chunk * BLOCK + tl.argmax(arrival, 0)).to(tl.int64))
