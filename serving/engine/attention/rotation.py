"""Rotary embeddings of queries and keys whose halves turn against each other, by one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

HEADS_PER_PROGRAM = 8  # of a token to a program
# Without it LLVM makes one ``fma.rn.bf16`` of a rounded product and the sum that follows, which rounds once less than
# torch does.
UNFUSED = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Rotation:
    """Queries and keys [1, heads, T, D] that are still to be rotated by ``cos`` and ``sin`` [1, T, D]."""

    q: Any
    k: Any
    cos: Any
    sin: Any

    @property
    def sizes(self) -> dict[str, int]:
        """Return the kernel's constants."""
        half = self.q.shape[-1] // 2
        padded = 1 << (half - 1).bit_length()
        return {
            "H": self.q.shape[1],
            "HKV": self.k.shape[1],
            "HALF": half,
            "HALF_PADDED": padded,
            "HEADS": HEADS_PER_PROGRAM,
        }

    @property
    def grid(self) -> tuple[int, int]:
        """Return the kernel's grid: for each token, the queries' heads and then the keys', ``HEADS`` at a time."""
        return self.q.shape[2], -(-self.q.shape[1] // HEADS_PER_PROGRAM) - (-self.k.shape[1] // HEADS_PER_PROGRAM)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Return the strides of heads and tokens."""
        return self.q.stride(1), self.q.stride(2), self.k.stride(1), self.k.stride(2)

    def apply(self) -> tuple[Any, Any]:
        """Return the rotated queries and keys [1, heads, T, D]."""
        from . import rotation_kernel

        q, k = (
            torch.empty_like(one.transpose(1, 2), memory_format=torch.contiguous_format) for one in (self.q, self.k)
        )
        rotation_kernel.rotate[self.grid](
            self.q, self.k, self.cos.contiguous(), self.sin.contiguous(), q, k, *self.strides,
            **self.sizes, **UNFUSED,
        )  # fmt: skip
        return q.transpose(1, 2), k.transpose(1, 2)


def fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return whether the kernel takes these: one row of tokens, [1, heads, T, D], turned in their full width."""
    width = q.shape[-1]
    return (
        (q.dim(), k.dim(), cos.dim()) == (4, 4, 3)
        and q.shape[0] == k.shape[0] == cos.shape[0] == 1
        and cos.shape == sin.shape == (1, q.shape[2], width)
        and k.shape[2:] == q.shape[2:]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and width % 2 == 0
        and q.stride(-1) == k.stride(-1) == 1
    )
