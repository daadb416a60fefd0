"""Attention of prompts' chunks by ``torch.nn.attention.varlen``, reading keys and values by their block tables.

torch has it for CUDA, by flash attention of a kind that reads block tables: whether it does on this device, with such
blocks, is found by computing a small example (stock torch 2.13 needs FlashAttention 3 for it, else it raises).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .plan import StepTables

logger = logging.getLogger(__name__)
HALVES = (torch.float16, torch.bfloat16)  # that flash attention takes
TOLERANCE = 0.02  # of the example's largest value, about 1


def varlen_attn(*args: Any, **options: Any) -> Any:
    """torch's, which brings the compiler with it: an engine that has no use for it does not import it."""
    from torch.nn.attention.varlen import varlen_attn as attend  # torch 2.13 on

    return attend(*args, **options)


def is_offered(k: Any, v: Any, head_dim: int) -> bool:
    """Whether it computes right over blocks as ``k`` and ``v`` [blocks, block size, Hkv, D]."""
    if k.device.type != "cuda" or k.dtype not in HALVES or v.shape != k.shape:
        return False
    return _computes_right(k.device, k.dtype, k.shape[1], k.shape[2], head_dim)


@cache
def _computes_right(device: Any, dtype: Any, block_size: int, num_kv_heads: int, head_dim: int) -> bool:
    make = torch.Generator().manual_seed(0)
    shape = (4, block_size, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=make).to(device, dtype) for _ in range(2))
    q = torch.randn((3, num_kv_heads, head_dim), generator=make).to(device, dtype)
    length = block_size + 3
    begins, table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [[2, 1]], [length]))
    tables = VarlenTables(begins, table, lengths, 3, length)
    try:
        found = tables.attend(q, k, v, head_dim**-0.5, None).float()
    except (ImportError, RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        logger.info("prompts are computed block table by block table, not by varlen_attn: %s", error)
        return False
    keys, values = (x[[2, 1]].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k, v))
    mask = torch.ones(3, length, dtype=torch.bool, device=device).tril(length - 3)
    wanted = F.scaled_dot_product_attention(q.transpose(0, 1).float(), keys, values, attn_mask=mask).transpose(0, 1)
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


@dataclass(frozen=True, slots=True)
class VarlenTables:
    """Of the chunks of a step: where each begins in their row int32 [n + 1], their ``block_tables`` int32 [n, blocks]
    and their sequences' ``lengths`` int32 [n] after them."""

    begins: Any
    block_tables: Any
    lengths: Any
    most: int
    longest: int

    @classmethod
    def of(cls, tables: StepTables) -> VarlenTables:
        chunks = tables.chunks
        on_device = {"dtype": torch.int32, "device": chunks[0].blocks.device}
        first = chunks[0].a
        table = torch.zeros(len(chunks), max(len(chunk.blocks) for chunk in chunks), **on_device)
        for row, chunk in zip(table, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        lengths = [chunk.stop for chunk in chunks]
        return cls(
            torch.tensor([first - first, *(chunk.b - first for chunk in chunks)], **on_device),
            table,
            torch.tensor(lengths, **on_device),
            max(chunk.b - chunk.a for chunk in chunks),
            max(lengths),
        )

    def attend(self, q: Any, k: Any, v: Any, scaling: float, window: int | None) -> Any:
        """q [T, H, D] → [T, H, D]. In one part (``num_splits``): a row's bits are the same alone and in any batch."""
        return varlen_attn(
            q,
            k,
            v,
            self.begins,
            None,
            self.most,
            self.longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[2],
            seqused_k=self.lengths,
            block_table=self.block_tables,
            num_splits=1,
        )
