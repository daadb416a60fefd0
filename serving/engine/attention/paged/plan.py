"""Attention of one flat row of tokens over KV blocks.

::

    row        | d0 d1 d2 d3 | p p p p p | p p |      single tokens first, then chunks of prompts
    decode       one call                              split over the length of each sequence (``decode_kernel``)
    prefill                    all chunks in one call if torch can (``varlen``), else one each, its blocks gathered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv_cache import AttentionArgs, LayerShape
from ..slab import Slab
from ..slot_attention import attend_latent_prefill, causal_mask, prefill
from . import decode, varlen
from .step_tables import Chunk, StepTables

if TYPE_CHECKING:
    from ..latent_attention import Projections


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer: ``k``, ``v`` [blocks, block size, Hkv, D]; the same memory if values are the keys
    themselves."""

    shape: LayerShape
    k: Any
    v: Any

    @classmethod
    def of(cls, shape: LayerShape, num_blocks: int, block_size: int, dtype: Any, device: Any) -> LayerBlocks:
        """Allocate zeroed blocks, so that unwritten slots are finite."""

        def make(dim: int) -> Any:
            size = (num_blocks, block_size, shape.num_kv_heads, dim)
            return Slab(math.prod(size), dtype, device).tensor.view(size)

        k = make(shape.key_dim)
        return cls(shape, k, k if shape.shared else make(shape.value_dim))

    def write(self, indexes: Any, k: Any, v: Any) -> None:
        """Store k, v [Hkv, T, D] at ``indexes`` [T]."""
        for blocks, new in self._pairs(k, v):
            blocks.flatten(0, 1).index_copy_(0, indexes, new.transpose(0, 1))

    def gather(self, blocks: Any, lo: int, hi: int) -> tuple[Any, Any]:
        """Gather keys and values [Hkv, hi - lo, D] of tokens ``[lo, hi)`` of a sequence with block table ``blocks``."""
        size = self.k.shape[1]
        first = lo // size
        some = blocks[first : -(-hi // size)]
        both = [cube[some].flatten(0, 1)[lo - first * size : hi - first * size].transpose(0, 1) for cube in self._cubes]
        return both[0], both[-1]

    def copy(self, source: int, target: int) -> None:
        """Copy one block."""
        for cube in self._cubes:
            cube[target] = cube[source]

    def zero(self, blocks: Sequence[int]) -> None:
        for cube in self._cubes:
            cube[list(blocks)] = 0

    @property
    def _cubes(self) -> tuple[Any, ...]:
        return (self.k,) if self.shape.shared else (self.k, self.v)

    def _pairs(self, k: Any, v: Any) -> list[tuple[Any, Any]]:
        return [(self.k, k)] if self.shape.shared else [(self.k, k), (self.v, v)]


class PagedPlan:
    """The attention plan of a step over blocks. Used for one forward, or repeatedly with tables that change in place
    (``decode_graphs``)."""

    def __init__(self, layers: Sequence[LayerBlocks], tables: StepTables, max_model_len: int) -> None:
        self._layers = layers
        self._tables = tables
        self._split = decode.split_tokens(max_model_len)
        self._masks: dict[tuple[int, int | None], tuple[int, Any]] = {}
        self._varlen = varlen.VarlenTables.of(tables) if tables.chunks else None

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend``."""
        blocks, tables = self._layers[layer], self._tables
        blocks.write(tables.indexes, k[0], v[0])
        n, (H, T) = tables.num_decodes, q.shape[1:3]
        if not tables.chunks:
            return self._decode(blocks, q[0].transpose(0, 1), args)[None]
        out = q.new_empty((1, T, H, blocks.shape.value_dim))
        if n:
            single = q[0, :, :n].transpose(0, 1)
            out[0, :n] = self._decode(blocks, single, args)
        assert self._varlen is not None
        if args.is_plain and varlen.is_offered(blocks.k, blocks.v, q.shape[-1]):
            out[0, n:] = self._varlen.attend(q[0, :, n:].transpose(0, 1), blocks.k, blocks.v, args)
            return out
        for chunk in tables.chunks:
            lo, mask = self._seen(chunk, args.window, q.device)
            keys, values = blocks.gather(chunk.blocks, lo, chunk.stop)
            out[0, chunk.a : chunk.b] = prefill(keys, values, q[0, :, chunk.a : chunk.b], mask, args)
        return out

    def attend_latent(self, layer: int, q: Any, kept: Any, projections: Projections, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend_latent``."""
        blocks, tables = self._layers[layer], self._tables
        blocks.write(tables.indexes, kept[0], kept[0])
        n, (H, T) = tables.num_decodes, q.shape[1:3]
        out = q.new_empty((1, T, H, projections.form.value_dim))
        if n:
            absorbed = projections.absorbed(q[0, :, :n], 0).transpose(0, 1)
            out[0, :n] = projections.values(self._decode(blocks, absorbed, args), 0)
        for chunk in tables.chunks:
            lo, mask = self._seen(chunk, args.window, q.device)
            keys, _ = blocks.gather(chunk.blocks, lo, chunk.stop)
            row = q[0, :, chunk.a : chunk.b]
            out[0, chunk.a : chunk.b] = attend_latent_prefill(keys, row, chunk.a, mask, projections, args)
        return out

    def _seen(self, chunk: Chunk, window: int | None, device: Any) -> tuple[int, Any]:
        """Return the first token that a chunk reads, and its mask: the same in every layer with that window."""
        found = self._masks.get((chunk.a, window))
        if found is None:
            lo = max(0, chunk.start - window + 1) if window else 0
            found = self._masks[chunk.a, window] = lo, causal_mask(chunk.start, chunk.stop, lo, window, device)
        return found

    def _decode(self, blocks: LayerBlocks, q: Any, args: AttentionArgs) -> Any:
        """Attend single tokens q [B, H, D] → [B, H, Dv]."""
        tables = self._tables
        use = decode.attend_split if decode.is_offered(blocks.k, blocks.v, q) else decode.attend
        return use(
            q, blocks.k, blocks.v, tables.block_tables, tables.lengths, args,
            longest=tables.longest, split=self._split,
        )  # fmt: skip
