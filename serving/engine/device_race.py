"""The sampler's race on a device: the same random bits as ``randomness`` makes on CPU, and the winner found there.

A row of times for a vocabulary of 128,000 is half a megabyte that would be made by the processor and copied to the
device each step; here each time is made where it is needed, of (seed, position, token) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..request import Sampling
from . import triton_here
from .upload import upload_values

BLOCK = 1024  # tokens that a program races among


def is_offered(device: Any) -> bool:
    """Whether times are made on this device."""
    return triton_here.on(device)


def exponentials(seeds: Sequence[int], positions: Sequence[int], size: int, device: Any) -> Any:
    """As ``randomness.exponentials``, on the device: of the same bits; a time may differ in its last ones."""
    from . import device_race_kernel as kernel

    times = torch.empty(len(seeds), size, dtype=torch.float32, device=device)
    keys = _keys(seeds, positions, device)
    kernel.exponentials[(len(seeds), -(-size // BLOCK))](keys, times, size, BLOCK=BLOCK)
    return times


def race(logits: Any, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """The winner of each row of ``logits`` float32 [B, V] at its temperature, among tokens of at least ``min_p`` of the
    likeliest one's probability: int64 [B] on the device, which is not waited for."""
    from . import device_race_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    scales = upload_values([1.0 / p.temperature for p in parameters], torch.float32, device)
    least = upload_values([p.min_p for p in parameters], torch.float32, device)
    floors = logits.amax(-1) * scales + torch.log(least)  # -inf where there is none
    chunks = -(-size // BLOCK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    keys = _keys(seeds, positions, device)
    kernel.race[(rows, chunks)](logits.contiguous(), keys, scales, floors, scores, winners, size, BLOCK=BLOCK)
    return winners.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def _keys(seeds: Sequence[int], positions: Sequence[int], device: Any) -> Any:
    """int64 [B, 2], of the bits of uint64."""
    signed = [
        [seed - (1 << 64) if seed >= 1 << 63 else seed, position]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return upload_values(signed, torch.int64, device)
