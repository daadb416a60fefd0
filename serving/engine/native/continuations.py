"""Find the best continuations of a search's beams natively (continuations.h).

One pass replaces a log-softmax, a sum and a ``topk`` over the vocabularies of all beams."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from . import library


class Continuations(NamedTuple):
    """The greatest ``sums`` of a beam's score and a token's log probability, float32, in order, and their ``places``:
    beam * ``size`` + token, with ``size`` that of the vocabulary."""

    sums: npt.NDArray[np.float32]
    places: npt.NDArray[np.int64]
    size: int


def can_continue(logits: Sequence[Any]) -> bool:
    """Return whether rows [V] like these are supported: float32 on CPU, contiguous, and the library is there."""
    rows = all(row.dtype == torch.float32 and row.device.type == "cpu" and row.is_contiguous() for row in logits)
    return rows and library.library() is not None


def best_continuations(logits: Sequence[Any], scores: npt.NDArray[np.float32], keep: int) -> Continuations:
    """Find at most ``keep`` continuations; among equal ones the first come first.

    ``logits`` has a row [V] for each beam, ``scores`` at least one number for each. Raises ``FloatingPointError`` if a
    row has a NaN or no finite maximum."""
    beams, size = len(logits), len(logits[0])
    rows = (c_void_p * beams)(*(row.data_ptr() for row in logits))
    scores = np.ascontiguousarray(scores[:beams], dtype=np.float32)
    keep = min(keep, beams * size)
    sums, places, found = np.empty(keep, np.float32), np.empty(keep, np.int64), ctypes.c_int32()
    library.required().mlflow_llm_continuations(
        rows, scores.ctypes.data, beams, size, keep, sums.ctypes.data, places.ctypes.data, ctypes.byref(found)
    )
    if found.value < 0:
        raise FloatingPointError("logits are not finite")
    return Continuations(sums[: found.value], places[: found.value], size)
