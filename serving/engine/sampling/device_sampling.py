"""The sampler's race on a device, with the same random bits that ``randomness`` makes on the CPU.

A row of times for a vocabulary of 128,000 takes half a megabyte, which the processor would have to make and copy to the
device in each step. Here each time is made on the device, where it is needed, from (seed, position, token) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...interface.request import Sampling
from ..devices import triton_support
from ..devices.transfers import upload_values

BLOCK = 1024  # tokens that one program compares


def is_offered(device: Any) -> bool:
    """Return whether times can be made on this device."""
    return triton_support.enabled(device)


def exponentials(seeds: Sequence[int], positions: Sequence[int], size: int, device: Any) -> Any:
    """Do what ``randomness.exponentials`` does, on the device: from the same bits, though a time may differ in its last
    bits."""
    from . import device_sampling_kernel as kernel

    times = torch.empty(len(seeds), size, dtype=torch.float32, device=device)
    keys = sampling_keys(seeds, positions, device)
    kernel.exponentials[(len(seeds), -(-size // BLOCK))](keys, times, size, BLOCK=BLOCK)
    return times


def race(logits: Any, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Return the winner of each row of ``logits`` float32 [B, V] at its temperature, as int64 [B] on the device.

    Only tokens with at least ``min_p`` of the likeliest token's probability take part. The host does not wait."""
    from . import device_sampling_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    scales = upload_values([1.0 / p.temperature for p in parameters], torch.float32, device)
    least = upload_values([p.min_p for p in parameters], torch.float32, device)
    floors = logits.amax(-1) * scales + torch.log(least)  # -inf if min_p is 0
    chunks = -(-size // BLOCK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    keys = sampling_keys(seeds, positions, device)
    kernel.race[(rows, chunks)](logits.contiguous(), keys, scales, floors, scores, winners, size, BLOCK=BLOCK)
    return winners.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def sampling_keys(seeds: Sequence[int], positions: Sequence[int], device: Any) -> Any:
    """Return seeds and positions as int64 [B, 2] with the bits of uint64."""
    signed = [
        [seed - (1 << 64) if seed >= 1 << 63 else seed, position]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return upload_values(signed, torch.int64, device)
