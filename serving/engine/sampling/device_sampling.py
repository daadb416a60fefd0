"""The sampler's race on a device, with the same random bits that ``randomness`` makes on the CPU.

A row of times for a vocabulary of 128,000 takes half a megabyte, which the processor would have to make and copy to the
device in each step. Here each time is made on the device, where it is needed, from (seed, position, token) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...interface.request import Sampling
from ..devices import triton_support
from ..devices.transfers import constant, upload_values
from .top_logits import MAX_COUNT, top_logits

BLOCK_TOKENS = 1024  # tokens that one program compares
SEARCH_TOKENS = 4096  # tokens of a program that searches for the end of a nucleus
TILE_TOKENS = 1024  # of these at a time
LOGIT_RANGE = 40.0  # less probable tokens than exp(-LOGIT_RANGE) times the likeliest are in no nucleus
PARTS, DIGITS = 8, 8  # of the place where a nucleus ends, to RANGE / PARTS ** DIGITS


refused: dict[Any, str] = {}


def is_offered(device: Any) -> bool:
    """Return whether the kernels of this package run on a device."""
    return triton_support.enabled(device) and device not in refused


def refuse(device: Any, reason: str) -> None:
    """Do without the kernels on a device from now on."""
    refused[device] = reason


def exponentials(seeds: Sequence[int], positions: Sequence[int], size: int, device: Any) -> Any:
    """Do what ``randomness.exponentials`` does, on the device: from the same bits, though a time may differ in its last
    bits."""
    from . import device_sampling_kernel as kernel

    times = torch.empty(len(seeds), size, dtype=torch.float32, device=device)
    keys = sampling_keys(seeds, positions, device)
    kernel.exponentials[(len(seeds), -(-size // BLOCK_TOKENS))](keys, times, size, BLOCK=BLOCK_TOKENS)
    return times


def exponentials_at(ids: Any, seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Return the times of the tokens ``ids`` int64 [B, N] alone."""
    from . import device_sampling_kernel as kernel

    (rows, width), device = ids.shape, ids.device
    times = torch.empty(rows, width, dtype=torch.float32, device=device)
    grid = rows, -(-width // BLOCK_TOKENS)
    kernel.exponentials_at[grid](
        sampling_keys(seeds, positions, device), ids.contiguous(), times, width, BLOCK=BLOCK_TOKENS
    )
    return times


def race(logits: Any, best: Any, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Return the winner of each row of ``logits`` [B, V] at its temperature, as int64 [B] on the device.

    Tokens take part by ``top_p``, ``min_p`` and ``typical_p``, with all that are as probable as the last of them to
    float32's precision; ``best`` [B] are the largest logits. The host does not wait."""
    from . import device_sampling_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    scales = constant(tuple(1.0 / p.temperature for p in parameters), torch.float32, device)
    limits = tuple((p.top_p, -math.log(p.min_p) if p.min_p else math.inf, p.typical_p) for p in parameters)
    floors, ceilings = kept(logits, best.float(), scales, limits)
    blocks = -(-size // BLOCK_TOKENS)
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    keys = sampling_keys(seeds, positions, device)
    kernel.race[(rows, blocks)](
        logits, keys, scales, floors, ceilings, scores, winners, logits.stride(0), size, BLOCK=BLOCK_TOKENS
    )
    return winners.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def kept(logits: Any, best: Any, scales: Any, limits: Sequence[tuple[float, float, float]]) -> tuple[Any, Any]:
    """Return the smallest and the largest logit times scale of each row that ``limits`` keep, float32 [B] each:
    top_p, -log(min_p) and typical_p of each row."""
    from . import device_sampling_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    blocks = -(-size // SEARCH_TOKENS)
    bounds = constant(tuple(limits), torch.float32, device)
    floors, ceilings, fars, means = torch.zeros(4, rows, dtype=torch.float32, device=device)
    sums = torch.empty(DIGITS, rows, blocks, PARTS, dtype=torch.float32, device=device)
    state = torch.empty(DIGITS, rows, 2, dtype=torch.float64, device=device)
    found = {"CHUNKS": 1 << (blocks - 1).bit_length(), "RANGE": LOGIT_RANGE, "PARTS": PARTS, "DIGITS": DIGITS}

    def search(centers: Any, ends: Any, column: int) -> None:
        for digit in range(DIGITS):
            kernel.sums_of_parts[(rows, blocks)](
                logits, best, scales, centers, ends, bounds[:, column], sums, state, logits.stride(0), size, 3,
                digit, BLOCK=SEARCH_TOKENS, TILE=min(TILE_TOKENS, SEARCH_TOKENS), **found,
            )  # fmt: skip

    is_cut = any(top_p < 1.0 for top_p, _, _ in limits)
    if is_cut:
        search(means, constant((LOGIT_RANGE,) * rows, torch.float32, device), 0)
    kernel.nucleus[(rows,)](sums, state, bounds, best, scales, fars, floors, ceilings, blocks, SEARCHED=is_cut, **found)
    if any(share < 1.0 for _, _, share in limits):
        kernel.mean_distance[(rows,)](
            logits, best, scales, bounds, fars, means, logits.stride(0), size, TILE=4096, RANGE=LOGIT_RANGE,
            num_warps=16,
        )  # fmt: skip
        search(means, fars, 2)
        kernel.typical[(rows,)](sums, state, bounds, best, scales, fars, means, floors, ceilings, blocks, **found)
    return floors, ceilings


def race_limited(logits: Any, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Do what ``race`` does for rows with a top_k of at most ``MAX_COUNT``, within that, top_p and min_p."""
    from . import device_sampling_kernel as kernel

    rows, device = len(logits), logits.device
    found = top_logits(logits, min(max(p.top_k for p in parameters), logits.shape[-1]))
    width = found.values.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    kernel.race_limited[(rows,)](
        found.values,
        found.ids,
        sampling_keys(seeds, positions, device),
        constant(tuple(p.temperature for p in parameters), torch.float32, device),
        constant(tuple((float(p.top_k), p.top_p, p.min_p) for p in parameters), torch.float64, device),
        tokens,
        width,
        PADDED=MAX_COUNT,
    )
    return tokens


def sampling_keys(seeds: Sequence[int], positions: Sequence[int], device: Any) -> Any:
    """Return seeds and positions as int64 [B, 2] with the bits of uint64."""
    signed = [
        [seed - (1 << 64) if seed >= 1 << 63 else seed, position]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return upload_values(signed, torch.int64, device)
