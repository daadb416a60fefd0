"""The largest logits of each row of a device, by our kernels: torch's ``topk`` takes several times as long over a
vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK = 2048
MAX_COUNT = 64  # of a row; the kernel finds one after the other


class TopLogits(NamedTuple):
    """The largest logits of each row: the log of the sum of all exp(logit), ``totals`` float32 [B], NaN if one is not
    finite or all are minus infinity, and the largest ``values`` with their ``ids``, [B, count], in descending order."""

    totals: Any
    values: Any
    ids: Any


def top_logits(logits: Any, count: int) -> TopLogits:
    """Find the ``count`` largest of each row of ``logits`` [B, V], without waiting for the device."""
    from . import top_logits_kernel as kernel

    (rows, size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    assert 1 <= count <= MAX_COUNT
    blocks = -(-size // BLOCK)
    values = torch.empty(rows, blocks, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, blocks, count, dtype=torch.int64, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    kernel.top_of_block[(rows, blocks)](logits, values, ids, sums, logits.stride(0), size, count, BLOCK=BLOCK)
    totals = torch.empty(rows, dtype=torch.float32, device=device)
    padded = max(1 << (blocks - 1).bit_length(), 16)
    kernel.total_of_row[(rows,)](values, sums, totals, blocks, count, PADDED=padded)
    values, at = values.view(rows, -1).topk(count, dim=-1)
    return TopLogits(totals, values, ids.view(rows, -1).gather(1, at))
