"""Draw tokens by the native form of the sampler's race (sampler.h), for the parameters that most requests have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
import numpy.typing as npt
import torch

from ...interface.request import Sampling
from . import library


def can_draw(logits: torch.Tensor) -> bool:
    """Return whether rows like ``logits`` [B, V] can be drawn natively: float32 on CPU, and the library is there."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library.library() is not None


def largest(logits: torch.Tensor) -> list[int]:
    """Return the token with the largest logit in each row of ``logits`` [B, V] float32, the first among equals; -1
    if that logit is not finite or a row has a NaN."""
    logits = logits.contiguous()
    rows, size = logits.shape
    tokens = np.empty(rows, dtype=np.int32)
    _library().mlflow_llm_largest(logits.data_ptr(), rows, size, tokens.ctypes.data)
    found: list[int] = tokens.tolist()
    return found


def draw_rows(
    logits: torch.Tensor,
    rows: Sequence[int],
    parameters: Sequence[Sampling],
    seeds: Sequence[int],
    positions: Sequence[int],
    masks: Sequence[npt.NDArray[np.uint32] | None],
) -> list[int]:
    """Draw a token for each of ``rows`` of ``logits`` [B, V] float32, without copying them, by temperature (0 for the
    largest), top_k, top_p, min_p and typical_p.

    A row's mask, if it has one, has a bit for each token and says which are allowed."""
    logits = logits.contiguous()
    first, stride, count = logits.data_ptr(), logits.shape[1] * logits.element_size(), len(rows)
    addresses = (c_void_p * count)(*(first + row * stride for row in rows))
    bits = (c_void_p * count)(*(None if mask is None else mask.ctypes.data for mask in masks))
    tokens = np.empty(count, dtype=np.int32)
    draws = _draws(parameters, seeds, positions)
    _library().mlflow_llm_sample_rows(addresses, bits, count, logits.shape[1], draws, tokens.ctypes.data)
    drawn: list[int] = tokens.tolist()
    return drawn


def draw(
    logits: torch.Tensor, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Draw a token for each row of ``logits`` [B, V] float32, by temperature (above 0), top_k, top_p, min_p and
    typical_p."""
    logits = logits.contiguous()
    rows, size = logits.shape
    tokens = np.empty(rows, dtype=np.int32)
    draws = _draws(parameters, seeds, positions)
    _library().mlflow_llm_sample(logits.data_ptr(), rows, size, draws, tokens.ctypes.data)
    drawn: list[int] = tokens.tolist()
    return drawn


def _library() -> ctypes.CDLL:
    found = library.library()
    if found is None:
        raise RuntimeError("the native kernels are not available")
    return found


def _draws(
    parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> ctypes.Array[library.Draw]:
    return (library.Draw * len(parameters))(
        *(
            library.Draw(p.temperature, p.top_p, p.min_p, max(p.top_k, 0), p.typical_p, seed, position)
            for p, seed, position in zip(parameters, seeds, positions, strict=True)
        )
    )
