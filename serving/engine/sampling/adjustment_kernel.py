"""The penalties of every row of logits in one pass, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalize(
    logits: tl.tensor,
    words: tl.tensor,
    slots: tl.tensor,
    penalties: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block of a row of ``logits`` to ``out`` float32 [B, size], with ``penalties`` [B, 3] (repetition,
    presence, frequency) where the row's words are not 0; a row whose slot is negative as it is."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < size
    value = tl.load(logits + row * stride + token, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    word = tl.load(words + slot * size + token, mask=mask & (slot + 0 * token >= 0), other=0)
    repetition = tl.load(penalties + 3 * row)
    presence = tl.load(penalties + 3 * row + 1)
    frequency = tl.load(penalties + 3 * row + 2)
    repeated = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(word != 0, repeated, value)
    count = word >> 1
    lowered = value - (presence + frequency * count.to(tl.float32))
    value = tl.where(count > 0, lowered, value)
    tl.store(out + row * size + token, value, mask=mask)
