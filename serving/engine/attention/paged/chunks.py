"""Attention of the prompt chunks of a step over block tables, by the Triton kernel or, as the reference, by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ..kv_cache import AttentionArgs
from ..slot_attention import causal_mask, prefill
from . import kernel_trial
from .step_tables import StepTables


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """The chunks of a step: where each begins in their flat row int32 [n + 1], their ``block_tables`` int32 [n, blocks]
    and their sequences' ``lengths`` int32 [n] after them. ``sizes`` and ``stops`` are the same on the host."""

    begins: Any
    block_tables: Any
    lengths: Any
    sizes: Sequence[int]
    stops: Sequence[int]
    _seen: dict[tuple[int, int | None], tuple[int, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: StepTables) -> ChunkTables:
        chunks = tables.chunks
        sizes, stops = [chunk.b - chunk.a for chunk in chunks], [chunk.stop for chunk in chunks]
        return cls.make(sizes, stops, tables.chunk_tables)

    @classmethod
    def make(cls, sizes: Sequence[int], stops: Sequence[int], block_tables: Any) -> ChunkTables:
        """Make the tables of chunks with the last ``sizes`` of ``stops`` tokens of their sequences."""
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        both = torch.tensor([*ends, *stops], dtype=torch.int32).to(block_tables.device)
        return cls(both[: len(ends)], block_tables, both[len(ends) :], sizes, stops)

    def seen(self, chunk: int, window: int | None) -> tuple[int, Any]:
        """Return the first token that a chunk reads, and its mask: the same in every layer with that window."""
        found = self._seen.get((chunk, window))
        if found is None:
            stop = self.stops[chunk]
            start = stop - self.sizes[chunk]
            lo = max(0, start - window + 1) if window else 0
            found = self._seen[chunk, window] = lo, causal_mask(start, stop, lo, window, self.lengths.device)
        return found

    @property
    def max_size(self) -> int:
        return max(self.sizes)

    @property
    def longest(self) -> int:
        return max(self.stops)


def why_not(k: Any, v: Any, group: int) -> str:
    """Return why the kernel does not run over blocks like ``k`` and ``v`` with ``group`` query heads per KV head; "" if
    it does."""
    return kernel_trial.why_not(k, v, group, probe)


@cache
def probe(device: Any, dtype: Any, block_size: int, group: int, key_dim: int, value_dim: int) -> str:
    """Probe the kernel with two chunks, one of them after a prefix that it reads from other blocks."""
    make = torch.Generator().manual_seed(0)
    k, v = (torch.randn(12, block_size, 1, dim, generator=make).to(device, dtype) for dim in (key_dim, value_dim))
    sizes, stops = [3, 5], [3, block_size * 9 + 2]
    q = torch.randn(sum(sizes), group, key_dim, generator=make).to(device, dtype)
    table = torch.arange(11, 1, -1, dtype=torch.int32, device=device).repeat(2, 1)
    example = (q, k, v, ChunkTables.make(sizes, stops, table), AttentionArgs(key_dim**-0.5))
    return kernel_trial.why_wrong(
        lambda: attend_by_kernel(*example), lambda: attend(*example), dtype, "prompt chunks attend by torch"
    )


def attend(q: Any, k: Any, v: Any, tables: ChunkTables, args: AttentionArgs) -> Any:
    """Compute q [T, H, D] over k, v [blocks, block size, Hkv, D] → [T, H, Dv], one chunk after the other, its blocks
    gathered."""
    out, a = q.new_empty((*q.shape[:2], v.shape[-1])), 0
    for i, (size, stop) in enumerate(zip(tables.sizes, tables.stops, strict=True)):
        lo, mask = tables.seen(i, args.window)
        keys, values = (gathered(cube, tables.block_tables[i], lo, stop) for cube in (k, v))
        out[a : a + size] = prefill(keys, values, q[a : a + size].transpose(0, 1), mask, args)
        a += size
    return out


def gathered(cube: Any, blocks: Any, lo: int, stop: int) -> Any:
    """Gather tokens ``[lo, stop)`` of a sequence with block table ``blocks`` from ``cube`` [blocks, block size, Hkv, D]
    as [Hkv, stop - lo, D]."""
    size = cube.shape[1]
    first = lo // size
    some = blocks[first : -(-stop // size)]
    return cube[some].flatten(0, 1)[lo - first * size : stop - first * size].transpose(0, 1)


def attend_by_kernel(q: Any, k: Any, v: Any, tables: ChunkTables, args: AttentionArgs) -> Any:
    """Compute the same by the kernel, in one launch."""
    from . import decode_kernel, prefill_kernel

    scaling, window, softcap, sinks = args
    T, H, D = q.shape
    Hkv, Dv = k.shape[2], v.shape[-1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    group = H // Hkv
    widths = {"D_PADDED": decode_kernel.padded(D), "DV_PADDED": decode_kernel.padded(Dv)}
    rows, tile = (128, 64) if max(widths.values()) <= 128 else (64, 32)  # what fits the registers
    rows = max(rows, decode_kernel.padded(group))
    out = torch.empty(T, H, Dv, dtype=q.dtype, device=q.device)
    grid = (-(-tables.max_size // (rows // group)), len(tables.sizes), Hkv)
    prefill_kernel.attend_chunks[grid](
        q, k, v, tables.begins, tables.block_tables, tables.lengths,
        out if sinks is None else sinks.float().contiguous(), out,
        scaling, softcap or 0.0, window or 0, q.stride(0), q.stride(1), tables.block_tables.stride(0),
        HKV=Hkv, GROUP=group, D=D, DV=Dv, BLOCK_SIZE=k.shape[1], ROWS=rows, TILE=tile,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, **widths,
        **_options(rows, q.dtype),
    )  # fmt: skip
    return out


def _options(rows: int, dtype: Any) -> dict[str, int]:
    """Return how the kernel is compiled: in 16 bits so that two programs fit the registers of a multiprocessor, one of
    which multiplies while the other computes exponentials."""
    if rows != 128:
        return {"num_warps": 4}
    narrow = {"num_stages": 2, "maxnreg": 128} if dtype.itemsize == 2 else {}
    return {"num_warps": 8, **narrow}
