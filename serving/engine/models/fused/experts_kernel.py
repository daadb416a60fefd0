"""Triton kernels of a mixture's experts in a step of few tokens. Only the weights of chosen experts are read.

::

    pair      0 1 2 | 3 4 5 | …             a token and one of its TOP experts: pair // TOP is the token
    ids       4 1 7 | 1 7 2 | …             its expert

    few       each pair is a program's own; few_down sums over a token's pairs as it goes
    grouped   the first of BLOCK_M pairs of an expert computes for all of them, the programs of the others end at once;
              ``combine`` sums over a token's pairs

Which pairs belong together is found in the programs themselves, so the grid depends only on the number of tokens, and
nothing is sorted or counted before. Weights in float8 are read as bytes (``weights/fp8_kernel.py``), with a scale for
each column of an expert. Ids from ``experts`` on have no weights: they give the token itself if IDENTITY, else
nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from ...weights.fp8_kernel import decoded

SILU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)  # with tanh
CLAMPED: tl.constexpr = tl.constexpr(2)  # gpt-oss


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, GATE: tl.constexpr) -> tl.tensor:
    """Return the activation of float32 gates times up, rounded in between to the type of ``up`` as torch does."""
    kind = up.dtype
    value, factor = gate.to(tl.float32), up.to(tl.float32)
    if GATE == CLAMPED:
        value = tl.minimum(value, limit)
        factor = tl.minimum(tl.maximum(factor, -limit), limit) + 1.0
        activated = value * tl.sigmoid(value * alpha)
    elif GATE == GELU:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        activated = value * tl.sigmoid(2.0 * inner)
    else:
        activated = value * tl.sigmoid(value)
    return (activated.to(kind).to(tl.float32) * factor).to(kind)


@triton.jit
def weights_at(place: tl.tensor, mask: tl.tensor, kind: tl.constexpr, DECODE: tl.constexpr) -> tl.tensor:
    """Load weights as ``kind``: as they are kept, or from float8 by ``DECODE``."""
    found = tl.load(place, mask=mask, other=0)
    if DECODE != "":
        found = decoded(found, kind, DECODE).to(kind)
    return found


@triton.jit
def scales_at(place: tl.tensor, mask: tl.tensor, DECODE: tl.constexpr) -> tl.tensor:
    """Load what sums of products by float8 weights are to be multiplied by."""
    scale = tl.load(place, mask=mask, other=0.0)
    if DECODE == "shift":
        scale = scale * 256.0
    return scale


@triton.jit
def few_up(
    x: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    experts: tl.tensor,
    expert_stride: tl.tensor,
    n_stride: tl.tensor,
    k_stride: tl.tensor,
    up_offset: tl.tensor,
    bias_n_stride: tl.tensor,
    bias_up_offset: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP: tl.constexpr,
    GATE: tl.constexpr,
    DECODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute the gated activation [pairs, N] of x [T, K] for BLOCK_N columns of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < experts:
        from_x = x + (pair // TOP) * K + k
        from_gate = weight + expert * expert_stride + n[:, None] * n_stride + k[None, :] * k_stride
        gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k < K
            mask = (n < N)[:, None] & inside[None, :]
            some = tl.load(from_x + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            gates += weights_at(from_gate + start * k_stride, mask, out.dtype.element_ty, DECODE).to(tl.float32) * some
            from_up = from_gate + start * k_stride + up_offset
            ups += weights_at(from_up, mask, out.dtype.element_ty, DECODE).to(tl.float32) * some
        gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
        if DECODE != "":
            from_scale = scale + expert * (2 * N) + n
            gate *= scales_at(from_scale, n < N, DECODE)
            up *= scales_at(from_scale + N, n < N, DECODE)
        if HAS_BIAS:
            from_bias = bias + expert * (2 * N) + n * bias_n_stride
            gate += tl.load(from_bias, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(from_bias + bias_up_offset, mask=n < N, other=0.0).to(tl.float32)
        kind = out.dtype.element_ty
        tl.store(out + pair * N + n, gated(gate.to(kind), up.to(kind), alpha, limit, GATE), mask=n < N)


@triton.jit
def few_down(
    x: tl.tensor,
    made: tl.tensor,
    ids: tl.tensor,
    scores: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    experts: tl.tensor,
    expert_stride: tl.tensor,
    n_stride: tl.tensor,
    k_stride: tl.tensor,
    TOP: tl.constexpr,
    IDENTITY: tl.constexpr,
    DECODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute BLOCK_N columns of a token's output [T, N]: the sum over its pairs of score times made [pairs, K]."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    place = n[:, None] * n_stride + k[None, :] * k_stride
    blocks = (K + BLOCK_K - 1) // BLOCK_K
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(TOP * blocks):
        pair = token * TOP + step // blocks
        start = (step % blocks) * BLOCK_K
        expert = tl.load(ids + pair).to(tl.int64)
        score = tl.load(scores + pair).to(tl.float32)
        inside = start + k < tl.where(expert < experts, K, 0)
        mask = (n < N)[:, None] & inside[None, :]
        some = tl.load(made + pair * K + start + k, mask=inside, other=0.0).to(tl.float32) * score
        from_weight = weight + expert * expert_stride + place + start * k_stride
        weights = weights_at(from_weight, mask, out.dtype.element_ty, DECODE).to(tl.float32)
        if DECODE != "":
            known = n < tl.where(expert < experts, N, 0)
            weights *= scales_at(scale + expert * N + n, known, DECODE)[:, None]
        sums += weights * some[None, :]
    y = tl.sum(sums, 1)
    if HAS_BIAS or IDENTITY:
        for j in range(TOP):
            expert = tl.load(ids + token * TOP + j).to(tl.int64)
            score = tl.load(scores + token * TOP + j).to(tl.float32)
            if HAS_BIAS:
                own = n < tl.where(expert < experts, N, 0)
                y += tl.load(bias + expert * N + n, mask=own, other=0.0).to(tl.float32) * score
            if IDENTITY:
                own = n < tl.where(expert < experts, 0, N)
                y += tl.load(x + token * N + n, mask=own, other=0.0).to(tl.float32) * score
    tl.store(out + token * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def rank_of(ids: tl.tensor, pair: tl.tensor, expert: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Return how many pairs before ``pair`` have its expert."""
    before = tl.sum(tl.zeros((CHUNK,), tl.int32), 0)
    for start in range(0, pair, CHUNK):
        at = start + tl.arange(0, CHUNK)
        before += tl.sum((tl.load(ids + at, mask=at < pair, other=-1) == expert).to(tl.int32), 0)
    return before


@triton.jit
def members_of(
    ids: tl.tensor, pair: tl.tensor, pairs: tl.tensor, expert: tl.tensor, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """Return the first BLOCK_M pairs of ``expert`` from ``pair`` on, int32 [BLOCK_M]; -1 where there are fewer."""
    member = tl.arange(0, BLOCK_M)
    found = tl.zeros((BLOCK_M,), tl.int32)
    seen = tl.sum(tl.zeros((CHUNK,), tl.int32), 0)
    for start in range(pair // CHUNK * CHUNK, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        hit = tl.load(ids + at, mask=(at >= pair) & (at < pairs), other=-1) == expert
        rank = seen + tl.cumsum(hit.to(tl.int32), 0) - 1
        chosen = hit[:, None] & (rank[:, None] == member[None, :])
        found += tl.sum(tl.where(chosen, at[:, None] + 1, 0), 0)
        seen += tl.sum(hit.to(tl.int32), 0)
    return found - 1


@triton.jit
def grouped_up(
    x: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    experts: tl.tensor,
    expert_stride: tl.tensor,
    n_stride: tl.tensor,
    k_stride: tl.tensor,
    up_offset: tl.tensor,
    bias_n_stride: tl.tensor,
    bias_up_offset: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    pairs: tl.tensor,
    TOP: tl.constexpr,
    GATE: tl.constexpr,
    DECODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute what ``few_up`` does for up to BLOCK_M pairs of an expert."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    if (expert < experts) & (rank_of(ids, pair, expert, CHUNK) % BLOCK_M == 0):
        members = members_of(ids, pair, pairs, expert, BLOCK_M, CHUNK)
        is_one = members >= 0
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        from_x = x + (members // TOP).to(tl.int64)[:, None] * K + k[None, :]
        from_gate = weight + expert.to(tl.int64) * expert_stride + n[None, :] * n_stride + k[:, None] * k_stride
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k < K
            mask = inside[:, None] & (n < N)[None, :]
            some = tl.load(from_x + start, mask=is_one[:, None] & inside[None, :], other=0.0)
            gates = weights_at(from_gate + start * k_stride, mask, some.dtype, DECODE)
            ups = weights_at(from_gate + start * k_stride + up_offset, mask, some.dtype, DECODE)
            gate = tl.dot(some, gates, gate, input_precision="ieee")
            up = tl.dot(some, ups, up, input_precision="ieee")
        if DECODE != "":
            from_scale = scale + expert.to(tl.int64) * (2 * N) + n
            gate *= scales_at(from_scale, n < N, DECODE)[None, :]
            up *= scales_at(from_scale + N, n < N, DECODE)[None, :]
        if HAS_BIAS:
            from_bias = bias + expert.to(tl.int64) * (2 * N) + n * bias_n_stride
            gate += tl.load(from_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(from_bias + bias_up_offset, mask=n < N, other=0.0).to(tl.float32)[None, :]
        kind = out.dtype.element_ty
        y = gated(gate.to(kind), up.to(kind), alpha, limit, GATE)
        tl.store(out + members.to(tl.int64)[:, None] * N + n[None, :], y, mask=is_one[:, None] & (n < N)[None, :])


@triton.jit
def grouped_down(
    made: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    experts: tl.tensor,
    expert_stride: tl.tensor,
    n_stride: tl.tensor,
    k_stride: tl.tensor,
    pairs: tl.tensor,
    DECODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute each pair's own output [pairs, N] from made [pairs, K], for up to BLOCK_M pairs of an expert."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    if (expert < experts) & (rank_of(ids, pair, expert, CHUNK) % BLOCK_M == 0):
        members = members_of(ids, pair, pairs, expert, BLOCK_M, CHUNK)
        is_one = members >= 0
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        from_made = made + members.to(tl.int64)[:, None] * K + k[None, :]
        from_weight = weight + expert.to(tl.int64) * expert_stride + n[None, :] * n_stride + k[:, None] * k_stride
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k < K
            some = tl.load(from_made + start, mask=is_one[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & (n < N)[None, :]
            weights = weights_at(from_weight + start * k_stride, mask, some.dtype, DECODE)
            y = tl.dot(some, weights, y, input_precision="ieee")
        if DECODE != "":
            y *= scales_at(scale + expert.to(tl.int64) * N + n, n < N, DECODE)[None, :]
        if HAS_BIAS:
            from_bias = bias + expert.to(tl.int64) * N + n
            y += tl.load(from_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
        place = out + members.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=is_one[:, None] & (n < N)[None, :])


@triton.jit
def combine(
    x: tl.tensor,
    each: tl.tensor,
    ids: tl.tensor,
    scores: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    experts: tl.tensor,
    TOP: tl.constexpr,
    IDENTITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum a token's outputs each [pairs, N], times their scores, in the order of its pairs → out [T, N]."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOP):
        pair = token * TOP + j
        expert = tl.load(ids + pair)
        score = tl.load(scores + pair).to(tl.float32)
        known = n < tl.where(expert < experts, N, 0)
        sums += tl.load(each + pair * N + n, mask=known, other=0.0).to(tl.float32) * score
        if IDENTITY:
            own = n < tl.where(expert < experts, 0, N)
            sums += tl.load(x + token * N + n, mask=own, other=0.0).to(tl.float32) * score
    tl.store(out + token * N + n, sums.to(out.dtype.element_ty), mask=n < N)
