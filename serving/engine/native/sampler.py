"""Tokens drawn by the native form of the race (sampler.h), for the parameters most requests have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...request import Sampling
from . import library


def can_draw(logits: torch.Tensor) -> bool:
    """Whether rows like ``logits`` [B, V] are drawn natively: float32 on CPU, where the library is."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library.library() is not None


def draw(
    logits: torch.Tensor, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """A token for each row of ``logits`` [B, V] float32, by temperature (above 0), top_k, top_p and min_p."""
    found = library.library()
    if found is None:
        raise RuntimeError("the native kernels are not available")
    logits = logits.contiguous()
    rows, size = logits.shape
    draws = (library.Draw * rows)(
        *(
            library.Draw(p.temperature, p.top_p, p.min_p, max(p.top_k, 0), seed, position)
            for p, seed, position in zip(parameters, seeds, positions, strict=True)
        )
    )
    tokens = np.empty(rows, dtype=np.int32)
    found.mlt_sample(logits.data_ptr(), rows, size, draws, tokens.ctypes.data)
    drawn: list[int] = tokens.tolist()
    return drawn
