"""Shapes of heads, and random blocks, queries and sinks for them, with which kernels over block tables are tried."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mlflow_llm.serving.engine.attention.kv_cache import AttentionArgs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 40


class Heads(NamedTuple):
    num: int
    num_kv: int
    key_dim: int
    value_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: Any = torch.float32
    shared: bool = False


class Example(NamedTuple):
    q: Any
    k: Any
    v: Any
    block_tables: Any
    args: AttentionArgs


def example(heads: Heads, num_queries: int, num_sequences: int, longest: int) -> Example:
    """Return random queries [T, H, D], laid out as a model's are, blocks, and a table of blocks a sequence."""
    make = torch.Generator().manual_seed(0)

    def random(*size: int) -> Any:
        return torch.randn(size, generator=make).to(DEVICE, heads.dtype)

    k = random(NUM_BLOCKS, heads.block_size, heads.num_kv, heads.key_dim)
    v = k[..., : heads.value_dim]
    if not heads.shared:
        v = random(NUM_BLOCKS, heads.block_size, heads.num_kv, heads.value_dim)
    q = random(heads.num, num_queries, heads.key_dim).transpose(0, 1)
    sinks = random(heads.num) if heads.sinks else None
    tables = torch.randint(0, NUM_BLOCKS, (num_sequences, longest // heads.block_size + 1), generator=make)
    args = AttentionArgs(heads.key_dim**-0.5, heads.window, heads.softcap, sinks)
    return Example(q, k, v, tables.to(DEVICE, torch.int32), args)
