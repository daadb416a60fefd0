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
def words(seed: tl.tensor, position: tl.tensor, counter: tl.tensor):  # type: ignore[no-untyped-def]
    """Return the four words of 64 bits at each ``counter``, int32; ``seed`` and ``position`` are uint64 scalars."""
    nothing = (counter * 0).to(tl.uint64)
    c0 = counter.to(tl.uint64)
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
    return c0, c1, c2, c3


@triton.jit
def bits(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return 32 random bits for each ``token``."""
    c0, c1, c2, c3 = words(seed, position, token // 8 + 1)
    word = (token % 8) // 2
    chosen = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    half = tl.where(token % 2 == 0, chosen, chosen >> 32)
    return (half & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def block_bits(seed: tl.tensor, position: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return what ``bits`` returns for the tokens of a block, [BLOCK], by an eighth of its arithmetic."""
    c0, c1, c2, c3 = words(seed, position, block * (BLOCK // 8) + tl.arange(0, BLOCK // 8) + 1)
    chosen = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return tl.interleave((chosen & 0xFFFFFFFF).to(tl.uint32), (chosen >> 32).to(tl.uint32))


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
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    tl.store(times + row * size + token, time_of(block_bits(seed, position, block, BLOCK)), mask=token < size)


@triton.jit
def exponentials_at(keys: tl.tensor, ids: tl.tensor, times: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write the times of the tokens ``ids`` int64 [B, width]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    token = tl.load(ids + row * width + place, mask=place < width, other=0).to(tl.int32)
    tl.store(times + row * width + place, time_of(bits(seed, position, token)), mask=place < width)


@triton.jit
def race(
    logits: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    floors: tl.tensor,
    ceilings: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the first of a program's tokens to arrive: that with the largest logit / temperature - log(time), of those
    within ``floors`` and ``ceilings`` of logit / temperature."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    logit = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    logit = logit * tl.load(scales + row)
    arrival = logit - tl.log(time_of(block_bits(seed, position, block, BLOCK)))
    outside = (logit < tl.load(floors + row)) | (logit > tl.load(ceilings + row))
    arrival = tl.where(outside, float("-inf"), arrival)
    place = row * tl.num_programs(1) + block
    tl.store(scores + place, tl.max(arrival, 0))
    tl.store(winners + place, (block * BLOCK + tl.argmax(arrival, 0)).to(tl.int64))


@triton.jit(do_not_specialize=["digit"])
def sums_of_parts(
    logits: tl.tensor,
    best: tl.tensor,
    scales: tl.tensor,
    centers: tl.tensor,
    fars: tl.tensor,
    shares: tl.tensor,
    sums: tl.tensor,
    state: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    share_stride: tl.tensor,
    digit: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANGE: tl.constexpr,
    PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
) -> None:
    """Sum the probabilities of a block's tokens nearer to the center than the end of each part, for one digit of the
    place where less than ``shares`` of the probability of all tokens up to ``fars`` is nearer.

    Distances are (best - logit) * scale. They are searched in steps of RANGE / PARTS ** DIGITS, a digit a launch;
    tokens within a step of each other are kept together. A share of 1 keeps all. ``sums`` [DIGITS, B, blocks, PARTS];
    ``state`` float64 [DIGITS + 1, B, 2] has what was found in the launches before: where the part begins, and the sum
    that is wanted."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    share = tl.load(shares + row * share_stride)
    if share < 1.0:
        steps: tl.constexpr = PARTS**DIGITS
        part = tl.arange(0, PARTS)
        low, wanted, span = part_found(sums, state, share, row, rows, blocks, digit, CHUNKS, PARTS, DIGITS)
        if block == 0:
            tl.store(state + (digit * rows + row) * 2, low.to(tl.float64))
            tl.store(state + (digit * rows + row) * 2 + 1, wanted.to(tl.float64))
        scale, top = tl.load(scales + row), tl.load(best + row)
        center, far = tl.load(centers + row), tl.load(fars + row)
        ends = low + (part + 1) * (span // PARTS)
        found = tl.zeros([PARTS, TILE], dtype=tl.float32)
        for first in range(0, BLOCK, TILE):
            token = block * BLOCK + first + tl.arange(0, TILE)
            value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
            distance = tl.minimum((top - value) * scale, RANGE)
            place = (tl.minimum(tl.abs(distance - center), RANGE) * (steps / RANGE)).to(tl.int32)
            weight = tl.where((distance <= far) & (token < size), tl.exp(-distance), 0.0)
            found += tl.where(place[None, :] < ends[:, None], weight[None, :], 0.0)
        tl.store(sums + ((digit * rows + row) * blocks + block) * PARTS + part, tl.sum(found, 1))


@triton.jit
def part_found(
    sums: tl.tensor,
    state: tl.tensor,
    share: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    digit: tl.tensor,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
) -> tl.tensor:
    """Return where the part begins that launches before ``digit`` found, the wanted sum, and the length of a part."""
    low = (row * 0).to(tl.int32)
    wanted = share * 0.0
    span = low + PARTS**DIGITS
    for _ in range(digit):
        span = span // PARTS
    if digit > 1:
        low = tl.load(state + ((digit - 1) * rows + row) * 2).to(tl.int32)
        wanted = tl.load(state + ((digit - 1) * rows + row) * 2 + 1).to(tl.float32)
    if digit > 0:
        chunk, part = tl.arange(0, CHUNKS), tl.arange(0, PARTS)
        own = sums + ((digit - 1) * rows + row) * blocks * PARTS
        mask = (chunk < blocks)[:, None] & (part >= 0)[None, :]
        before = tl.sum(tl.load(own + chunk[:, None] * PARTS + part[None, :], mask=mask, other=0.0), 0)
        if digit == 1:  # the last part ends the whole range
            wanted = share * tl.max(before, 0)
        low += span * tl.sum(((before < wanted) & (part < PARTS - 1)).to(tl.int32), 0)
    return low, wanted, span


@triton.jit
def width_found(
    sums: tl.tensor,
    state: tl.tensor,
    share: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    CHUNKS: tl.constexpr,
    RANGE: tl.constexpr,
    PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
) -> tl.tensor:
    """Return how far from the center tokens are kept."""
    width = share * 0.0 + RANGE * RANGE
    if share < 1.0:
        low, _, _ = part_found(sums, state, share, row, rows, blocks, DIGITS, CHUNKS, PARTS, DIGITS)
        width = (low + 1) * (RANGE / PARTS**DIGITS)
    return width


@triton.jit
def nucleus(
    sums: tl.tensor,
    state: tl.tensor,
    limits: tl.tensor,
    best: tl.tensor,
    scales: tl.tensor,
    fars: tl.tensor,
    floors: tl.tensor,
    ceilings: tl.tensor,
    blocks: tl.tensor,
    SEARCHED: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANGE: tl.constexpr,
    PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
) -> None:
    """Find between which scaled logits a row's tokens are kept by top_p, then min_p, and how far from the best.

    ``limits`` float32 [B, 3] are top_p, -log(min_p) and typical_p; SEARCHED: ``sums`` and ``state`` are of top_p."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    top = tl.load(best + row) * tl.load(scales + row)
    far = tl.load(limits + 3 * row + 1)
    if SEARCHED:
        share = tl.load(limits + 3 * row)
        far = tl.minimum(far, width_found(sums, state, share, row, rows, blocks, CHUNKS, RANGE, PARTS, DIGITS))
    rounding = tl.abs(top) * 4e-7
    tl.store(fars + row, far)
    tl.store(floors + row, top - far - rounding)
    tl.store(ceilings + row, top + rounding)


@triton.jit
def mean_distance(
    logits: tl.tensor,
    best: tl.tensor,
    scales: tl.tensor,
    limits: tl.tensor,
    fars: tl.tensor,
    means: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
    RANGE: tl.constexpr,
) -> None:
    """Find the mean distance of the kept tokens of a row with typical_p, weighted by probability."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(limits + 3 * row + 2) < 1.0:
        top, scale, far = tl.load(best + row), tl.load(scales + row), tl.load(fars + row)
        weights = tl.zeros([TILE], dtype=tl.float32)
        distances = tl.zeros([TILE], dtype=tl.float32)
        for first in range(0, size, TILE):
            token = first + tl.arange(0, TILE)
            value = tl.load(logits + row * stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
            distance = tl.minimum((top - value) * scale, RANGE)
            weight = tl.where((distance <= far) & (token < size), tl.exp(-distance), 0.0)
            weights += weight
            distances += weight * distance
        tl.store(means + row, tl.sum(distances, 0) / tl.sum(weights, 0))


@triton.jit
def typical(
    sums: tl.tensor,
    state: tl.tensor,
    limits: tl.tensor,
    best: tl.tensor,
    scales: tl.tensor,
    fars: tl.tensor,
    means: tl.tensor,
    floors: tl.tensor,
    ceilings: tl.tensor,
    blocks: tl.tensor,
    CHUNKS: tl.constexpr,
    RANGE: tl.constexpr,
    PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
) -> None:
    """Narrow what is kept of rows with typical_p. The surprise of a token is its distance from the best plus a
    constant, so what is typical is near the mean distance."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    share = tl.load(limits + 3 * row + 2)
    if share < 1.0:
        width = width_found(sums, state, share, row, rows, blocks, CHUNKS, RANGE, PARTS, DIGITS)
        top, mean = tl.load(best + row) * tl.load(scales + row), tl.load(means + row)
        rounding = tl.abs(top) * 4e-7
        tl.store(floors + row, top - tl.minimum(tl.load(fars + row), mean + width) - rounding)
        tl.store(ceilings + row, top - (mean - width) + rounding)


@triton.jit(do_not_specialize=["width"])
def race_limited(
    values: tl.tensor,
    ids: tl.tensor,
    keys: tl.tensor,
    temperatures: tl.tensor,
    limits: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Draw from the ``limits[0]`` largest logits of a row, then by top_p and min_p, ``limits`` float64 [B, 3].

    ``values`` float32 [B, width] are in descending order. See ``sampler.truncate``."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    mask = place < width
    seed = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    value = tl.load(values + row * width + place, mask=mask, other=float("-inf")) / tl.load(temperatures + row)
    token = tl.load(ids + row * width + place, mask=mask, other=0)
    top_k = tl.load(limits + 3 * row)
    top_p = tl.load(limits + 3 * row + 1)
    min_p = tl.load(limits + 3 * row + 2)
    value = tl.where(place < top_k, value, float("-inf")).to(tl.float64)
    weight = tl.exp(value - tl.max(value, 0))
    weight = weight / tl.sum(weight, 0)
    before = tl.cumsum(weight, 0) - weight
    weight = tl.where((before < top_p) | (place == 0), weight, 0.0)
    weight = tl.where(weight < tl.max(weight, 0) * min_p, 0.0, weight)
    arrival = weight / time_of(bits(seed, position, token.to(tl.int32))).to(tl.float64)
    winner = tl.argmax(tl.where(mask, arrival, -1.0), 0)
    tl.store(tokens + row, tl.load(ids + row * width + tl.minimum(winner, width - 1)))
