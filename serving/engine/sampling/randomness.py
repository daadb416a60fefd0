"""Random numbers that depend on (seed, position, token) alone, whatever else is sampled.

They come from numpy's counter-based generator Philox 4x64 (Salmon et al. 2011), keyed by seed and position; its counter
runs over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def exponentials(seeds: Sequence[int], positions: Sequence[int], size: int) -> Any:
    """Return exponential times at rate one, float32 [len(seeds), size], all above zero.

    ``seeds`` are uint64, ``positions`` below 2**32. Each time is made of 32 random bits: near zero, where races are
    won, it keeps float32's relative precision.
    """
    bits = np.empty((len(seeds), size), dtype=np.uint32)
    for row, seed, position in zip(bits, seeds, positions, strict=True):
        generator = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
        row[:] = generator.random_raw((size + 1) // 2).view(np.uint32)[:size]
    uniform = torch.from_numpy(bits.astype(np.float32)).add_(0.5).mul_(2.0**-32)
    return torch.log1p(uniform.clamp_(max=1 - 2.0**-24).neg_()).neg_()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Return uniform numbers in [0, 1), float64 [len(seeds)].

    They are independent of the times of the same seeds and positions, since the counter begins elsewhere.
    """
    bits = np.empty(len(seeds), dtype=np.uint64)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = np.array([seed, position], dtype=np.uint64)
        bits[row] = np.random.Philox(key=key, counter=np.array([0, 0, 0, 1], dtype=np.uint64)).random_raw()
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
