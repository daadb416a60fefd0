"""The largest logits of each row of a device, by our kernels: torch's ``topk`` takes several times as long over a
vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK_TOKENS = 2048  # tokens of a program: the fastest of three on an H100
ROW_PARTS = 256  # about: at least twice ``MAX_COUNT``, so that few logits are not below the largest of so many
MAX_CANDIDATES = 256  # candidates that are sorted
MAX_COUNT = 64  # of a row


class TopLogits(NamedTuple):
    """The largest logits of each row: the log of the sum of all exp(logit), ``totals`` float32 [B], NaN if one is not
    finite or all are minus infinity, and the largest ``values`` with their ``ids``, [B, count], in descending order and
    the first of equals before."""

    totals: Any
    values: Any
    ids: Any


def top_logits(logits: Any, count: int) -> TopLogits:
    """Find the ``count`` largest of each row of ``logits`` [B, V], without waiting for the device."""
    from . import top_logits_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    assert 1 <= count <= MAX_COUNT <= MAX_CANDIDATES
    part = power_from(-(-size // ROW_PARTS), 2)
    block = max(min(BLOCK_TOKENS, power_from(size, 2)), part)
    blocks, parts = -(-size // block), block // part
    maxima = torch.empty(rows, blocks, parts, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    totals, bounds = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    found = torch.empty(rows, dtype=torch.int32, device=device)
    keys = torch.empty(rows, MAX_CANDIDATES, dtype=torch.int64, device=device)
    values = torch.empty(rows, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    stride, grid = logits.stride(0), (rows, blocks)
    kernel.largest_of_parts[grid](logits, maxima, sums, stride, size, PART=part, PARTS=parts)
    padded = power_from(blocks * parts, max(MAX_COUNT, 2 * parts))
    kernel.bound_of_row[(rows,)](maxima, sums, totals, bounds, found, blocks, count, PARTS=parts, PADDED=padded)
    kernel.candidates[grid](logits, bounds, found, keys, stride, size, ROOM=MAX_CANDIDATES, BLOCK=block)
    kernel.sort_candidates[(rows,)](
        logits, found, keys, values, ids, stride, size, count, ROOM=MAX_CANDIDATES, BLOCK=min(block, 1024)
    )
    return TopLogits(totals, values, ids)


def power_from(number: int, least: int) -> int:
    """Return the first power of two from both numbers on; ``least`` is one."""
    return max(1 << (number - 1).bit_length(), least)
