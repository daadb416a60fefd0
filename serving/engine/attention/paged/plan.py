"""Attention of one flat row of tokens over KV blocks.

::

    row        | d0 d1 d2 d3 | p p p p p | p p |      single tokens first, then chunks of prompts
    decode       one call                              split over the length of each sequence (``decode_kernel``)
    prefill                    all chunks in one call by torch (``varlen``) or our kernel (``chunks``), whichever the
                               device has, else one each, its blocks gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..kv_cache import AttentionArgs
from ..rotation import Rotation
from ..slot_attention import attend_latent_prefill
from . import chunks, decode, varlen
from .layer_blocks import LayerBlocks
from .step_tables import StepTables

if TYPE_CHECKING:
    from ..latent_attention import Projections


class PagedPlan:
    """The attention plan of a step over blocks. Used for one forward, or repeatedly with tables that change in place
    (``decode_graphs``)."""

    def __init__(self, layers: Sequence[LayerBlocks], tables: StepTables, max_model_len: int) -> None:
        self._layers = layers
        self.tables = tables
        self._max_model_len = max_model_len
        self._chunks = chunks.ChunkTables.of(tables) if tables.chunks else None

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend``."""
        blocks = self._layers[layer]
        blocks.write(self.tables.indexes, k[0], v[0])
        return self._attend(blocks, q, args)

    def attend_rotated(self, layer: int, rotation: Rotation, v: Any, args: AttentionArgs) -> Any:
        """Do the same with queries and keys that are still to be rotated."""
        blocks = self._layers[layer]
        return self._attend(blocks, blocks.write_rotated(self.tables.indexes, rotation, v[0]), args)

    def _attend(self, blocks: LayerBlocks, q: Any, args: AttentionArgs) -> Any:
        tables = self.tables
        n, (H, T) = tables.num_decodes, q.shape[1:3]
        if not tables.chunks:
            return self._decode(blocks, q[0].transpose(0, 1), args)[None]
        out = q.new_empty((1, T, H, blocks.shape.value_dim))
        if n:
            single = q[0, :, :n].transpose(0, 1)
            out[0, :n] = self._decode(blocks, single, args)
        assert self._chunks is not None
        use = self._chunk_attention(blocks, H, q.shape[-1], args)
        out[0, n:] = use(q[0, :, n:].transpose(0, 1), blocks.k, blocks.v, self._chunks, args)
        return out

    def attend_latent(self, layer: int, q: Any, kept: Any, projections: Projections, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend_latent``."""
        blocks, tables = self._layers[layer], self.tables
        blocks.write(tables.indexes, kept[0], kept[0])
        n, (H, T) = tables.num_decodes, q.shape[1:3]
        out = q.new_empty((1, T, H, projections.form.value_dim))
        if n:
            absorbed = projections.absorbed(q[0, :, :n], 0).transpose(0, 1)
            out[0, :n] = projections.values(self._decode(blocks, absorbed, args), 0)
        for i, chunk in enumerate(tables.chunks):
            assert self._chunks is not None
            lo, mask = self._chunks.seen(i, args.window)
            keys = chunks.gathered(blocks.k, chunk.blocks, lo, chunk.stop)
            row = q[0, :, chunk.a : chunk.b]
            out[0, chunk.a : chunk.b] = attend_latent_prefill(keys, row, chunk.a, mask, projections, args)
        return out

    @staticmethod
    def _chunk_attention(blocks: LayerBlocks, num_heads: int, head_dim: int, args: AttentionArgs) -> Any:
        """Return what attends the chunks: in one launch, if this device has that."""
        if args.is_plain and varlen.is_offered(blocks.k, blocks.v, head_dim):
            return varlen.attend
        group = num_heads // blocks.shape.num_kv_heads
        return chunks.attend if chunks.why_not(blocks.k, blocks.v, group) else chunks.attend_by_kernel

    def _decode(self, blocks: LayerBlocks, q: Any, args: AttentionArgs) -> Any:
        """Attend single tokens q [B, H, D] → [B, H, Dv]."""
        tables = self.tables
        use = decode.attend_split if decode.is_offered(blocks.k, blocks.v, q) else decode.attend
        split = decode.split_tokens(self._max_model_len, q.shape[1] * blocks.shape.value_dim)
        return use(
            q, blocks.k, blocks.v, tables.block_tables, tables.lengths, args,
            longest=tables.longest, split=split,
        )  # fmt: skip
