"""Tokens drawn by the native form of the race (sampler.h), for the parameters most requests have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
import numpy.typing as npt
import torch

from ...request import Sampling
from . import library


def can_draw(logits: torch.Tensor) -> bool:
    """Whether rows like ``logits`` [B, V] are drawn natively: float32 on CPU, where the library is."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library.library() is not None


def largest(logits: torch.Tensor) -> list[int]:
    """The token of each row's largest of ``logits`` [B, V] float32, of equals the first; -1 where that is not finite or
    one is a NaN."""
    logits = logits.contiguous()
    rows, size = logits.shape
    tokens = np.empty(rows, dtype=np.int32)
    _library().mlt_largest(logits.data_ptr(), rows, size, tokens.ctypes.data)
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
    """A token for each of ``rows`` of ``logits`` [B, V] float32, which are read where they lie, by temperature (0 for
    the largest), top_k, top_p, min_p and typical_p: one that the row's mask allows, a bit a token, where it has one."""
    logits = logits.contiguous()
    first, stride, count = logits.data_ptr(), logits.shape[1] * logits.element_size(), len(rows)
    addresses = (c_void_p * count)(*(first + row * stride for row in rows))
    bits = (c_void_p * count)(*(None if mask is None else mask.ctypes.data for mask in masks))
    tokens = np.empty(count, dtype=np.int32)
    draws = _draws(parameters, seeds, positions)
    _library().mlt_sample_rows(addresses, bits, count, logits.shape[1], draws, tokens.ctypes.data)
    drawn: list[int] = tokens.tolist()
    return drawn


def draw(
    logits: torch.Tensor, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """A token for each row of ``logits`` [B, V] float32, by temperature (above 0), top_k, top_p, min_p and
    typical_p."""
    logits = logits.contiguous()
    rows, size = logits.shape
    tokens = np.empty(rows, dtype=np.int32)
    draws = _draws(parameters, seeds, positions)
    _library().mlt_sample(logits.data_ptr(), rows, size, draws, tokens.ctypes.data)
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
