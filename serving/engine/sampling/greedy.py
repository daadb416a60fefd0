"""The token with the largest logit of each row: by two kernels on CUDA, where torch has one program for a row."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from ..devices import overlap, triton_support

logger = logging.getLogger(__name__)
BLOCK_TOKENS = 4096  # tokens that one program compares


def greedy_tokens(logits: Any) -> Any:
    """Return the token with the largest of each row of ``logits`` [B, V], int64 [B] on their device: the first of
    equals, -1 if it is not finite. Nothing is waited for."""
    if logits.stride(-1) == 1 and is_offered(logits.device, logits.dtype):
        return by_kernel(logits)
    return by_torch(logits)


def by_torch(logits: Any) -> Any:
    """Do the same by torch."""
    best, tokens = logits.max(-1)
    return torch.where(torch.isfinite(best), tokens, -1)


def by_kernel(logits: Any) -> Any:
    """Do the same by our kernels: the largest of ``BLOCK_TOKENS`` tokens, then the largest of these."""
    from . import greedy_kernel as kernel

    rows, size = logits.shape
    chunks = -(-size // BLOCK_TOKENS)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    how = overlap.options(logits.device)
    kernel.largest_of_chunk[(rows, chunks)](logits, values, places, size, logits.stride(0), BLOCK=BLOCK_TOKENS, **how)
    padded = 1 << (chunks - 1).bit_length()
    kernel.largest_of_row[(rows,)](values, places, tokens, chunks, PADDED=max(padded, 2), num_warps=1, **how)
    return tokens


def is_offered(device: Any, dtype: Any) -> bool:
    """Return whether the kernels run on this device."""
    return triton_support.enabled(device) and computes_right(device, dtype)


@cache
def computes_right(device: Any, dtype: Any) -> bool:
    """Probe the kernels with rows that have equals, nothing finite, or numbers that are none."""
    size = 2 * BLOCK_TOKENS + 77
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits[1, [40, BLOCK_TOKENS - 1, BLOCK_TOKENS, size - 1]] = 99.0
    logits[2, size - 1] = float("nan")
    logits[3] = float("-inf")
    logits[4, BLOCK_TOKENS] = float("inf")
    logits[5, 1:] = float("-inf")
    reason = triton_support.why_wrong(lambda: by_kernel(logits), lambda: by_torch(logits), 0.0, "the kernel")
    if reason:
        logger.warning("torch finds the largest logits: %s", reason)
    return not reason
