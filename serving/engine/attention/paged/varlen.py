"""Attention of prompt chunks by ``torch.nn.attention.varlen``, which reads keys and values through block tables.

torch implements it for CUDA with a flash attention that supports block tables. Whether this device has it for such
blocks is probed with a small example (stock torch 2.13 needs FlashAttention 3, else it raises)."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ..kv_cache import AttentionArgs
from .chunks import ChunkTables

logger = logging.getLogger(__name__)
HALVES = (torch.float16, torch.bfloat16)  # the dtypes of flash attention
TOLERANCE = 0.02  # relative to the example's largest value, about 1


def varlen_attn(*args: Any, **options: Any) -> Any:
    """Call torch's operator. Imported here, since it loads the compiler, which an engine may not need."""
    from torch.nn.attention.varlen import varlen_attn as attend  # torch 2.13 on

    return attend(*args, **options)


def is_offered(k: Any, v: Any, head_dim: int) -> bool:
    """Return whether the operator computes correctly over blocks like ``k`` and ``v`` [blocks, block size, Hkv, D]."""
    if k.device.type != "cuda" or k.dtype not in HALVES or v.shape != k.shape:
        return False
    return computes_right(k.device, k.dtype, k.shape[1], k.shape[2], head_dim)


@cache
def computes_right(device: Any, dtype: Any, block_size: int, num_kv_heads: int, head_dim: int) -> bool:
    """Probe the operator with a chunk of three rows that spans two blocks."""
    make = torch.Generator().manual_seed(0)
    shape = (4, block_size, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=make).to(device, dtype) for _ in range(2))
    q = torch.randn((3, num_kv_heads, head_dim), generator=make).to(device, dtype)
    length = block_size + 3
    tables = ChunkTables.make([3], [length], torch.tensor([[2, 1]], dtype=torch.int32, device=device))
    try:
        found = attend(q, k, v, tables, AttentionArgs(head_dim**-0.5)).float()
    except (ImportError, RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        logger.info("prompt chunks do not attend by varlen_attn: %s", error)
        return False
    keys, values = (x[[2, 1]].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k, v))
    mask = torch.ones(3, length, dtype=torch.bool, device=device).tril(length - 3)
    wanted = F.scaled_dot_product_attention(q.transpose(0, 1).float(), keys, values, attn_mask=mask).transpose(0, 1)
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def attend(q: Any, k: Any, v: Any, tables: ChunkTables, args: AttentionArgs) -> Any:
    """Compute q [T, H, D] → [T, H, D]. ``num_splits`` is 1, so that a row's bits are the same alone and in any
    batch."""
    more: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[2] else {}
    return varlen_attn(
        q,
        k,
        v,
        tables.begins,
        None,
        tables.max_size,
        tables.longest,
        scale=args.scaling,
        window_size=(-1 if args.window is None else args.window - 1, 0),
        seqused_k=tables.lengths,
        block_table=tables.block_tables,
        num_splits=1,
        **more,
    )
