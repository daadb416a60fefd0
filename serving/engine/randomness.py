"""One uniform number for each (seed, position), whatever else is sampled: SplitMix64 as a counter-based hash."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014); wraps around on purpose."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Any, positions: Any) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits; ``seeds`` uint64 and ``positions`` (below 2**32) of equal shape."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    mixed = _mix(_mix(seed + GOLDEN) + (position + np.uint64(1)) * GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
