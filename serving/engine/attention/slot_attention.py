"""Attention of one flat row of tokens over KV slots.

::

    row        | d0 d1 d2 | d3 | p p p p p | p p |      single tokens first, in slot order, then chunks of prompts
    slots        4  5  6    9    7           2
    segments     [ 4..6 ]  [9]                          one call each: consecutive slots of similar length

Grouped queries are packed next to each other ([B, Hkv, group, D]), so that keys and values are read once and never
repeated. What is the same in every layer (ranges, masks, where to write) is computed once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from .kv_cache import AttentionArgs, LayerShape, Row

if TYPE_CHECKING:
    from .latent_attention import Projections

SEGMENT_COST_TOKENS = 256  # tokens that could be read in the time of one more attention call


class SlotSize(Protocol):
    @property
    def slot_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerViews:
    """The views of one layer: ``k``, ``v`` are [slots, Hkv, S, D]; ``k_rows``, ``v_rows`` are the same memory as
    rows of D.

    Tokens are moved and released in whole blocks of ``block``: the rest of a block is either the same in both places,
    or not read before it is written."""

    shape: LayerShape
    k: Any
    v: Any
    k_rows: Any
    v_rows: Any
    slot_elements: int
    offset: int
    slot_tokens: int
    block: int = 1

    @classmethod
    def of(
        cls,
        slab: Any,
        shape: LayerShape,
        num_slots: int,
        slot_elements: int,
        offset: int,
        size: SlotSize,
        block: int = 1,
    ) -> LayerViews:
        """Make the views of the layer whose keys begin ``offset`` elements into each slot of ``slab``."""
        S, H = size.slot_tokens, shape.num_kv_heads

        def views(at: int, dim: int) -> tuple[Any, Any]:
            cube = torch.as_strided(slab, (num_slots, H, S, dim), (slot_elements, S * dim, dim, 1), at)
            rows = torch.as_strided(slab, ((len(slab) - at) // dim, dim), (dim, 1), at)
            return cube, rows

        k, k_rows = views(offset, shape.key_dim)
        v, v_rows = (k, k_rows) if shape.shared else views(offset + H * S * shape.key_dim, shape.value_dim)
        return cls(shape, k, v, k_rows, v_rows, slot_elements, offset, S, block)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy tokens ``[start, stop)`` of slot ``source`` to the same positions in slot ``target``; the tokens before
        are the same in both."""
        start, stop = start // self.block * self.block, self._whole(stop)
        for cube in self._cubes:
            cube[target, :, start:stop] = cube[source, :, start:stop]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange the first ``length_a`` tokens of slot ``a`` with the first ``length_b`` of slot ``b``."""
        length_a, length_b = self._whole(length_a), self._whole(length_b)
        for cube in self._cubes:
            kept = cube[b, :, :length_b].clone()
            cube[b, :, :length_a] = cube[a, :, :length_a]
            cube[a, :, :length_b] = kept

    def tails(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of elements within a slot that hold only tokens ``[first, last)``: one range per head."""
        first, last = self._whole(first), self._whole(last)
        S, at, ranges = self.slot_tokens, self.offset, []
        for dim in (cube.shape[-1] for cube in self._cubes):
            for head in range(self.shape.num_kv_heads):
                ranges.append((at + (head * S + first) * dim, at + (head * S + last) * dim))
            at += self.shape.num_kv_heads * S * dim
        return ranges

    @property
    def _cubes(self) -> tuple[Any, ...]:
        return (self.k,) if self.shape.shared else (self.k, self.v)

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[a, b)``, which decode over slots ``[slot, slot + b - a)``, reading tokens ``[lo, hi)`` under ``mask``."""

    a: int
    b: int
    slot: int
    lo: int
    hi: int
    mask: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[a, b)`` of the row, which prefill ``slot``, reading tokens ``[lo, hi)``; causal if there is no
    ``mask``."""

    a: int
    b: int
    slot: int
    lo: int
    hi: int
    mask: Any


class SlotPlan:
    """The attention plan of a step over slots. ``rows`` with one token come first, ordered by slot; ``slots`` are the
    rows' slots."""

    def __init__(
        self, layers: list[LayerViews], slot_tokens: int, rows: Sequence[Row], slots: list[int], device: Any
    ) -> None:
        self._layers = layers
        self._S = slot_tokens
        self._device = device
        self._num_decodes = sum(1 for row in rows if row.num_tokens == 1)
        self._slots = slots
        self._rows = rows
        self._lengths = np.array([row.start + row.num_tokens for row in rows], dtype=np.int64)
        self._longest = int(self._lengths.max())
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        self._row_slots = np.repeat(np.array(slots, dtype=np.int64), counts)
        self._positions = np.concatenate([np.arange(r.start, r.start + r.num_tokens, dtype=np.int64) for r in rows])
        self._segments_of_decodes = self._split()
        self._work: dict[int | None, tuple[list[Segment], list[Chunk]]] = {}
        self._indexes: dict[tuple[int, int, int], Any] = {}

    def _split(self) -> list[tuple[int, int]]:
        """Split decode rows into ranges of consecutive slots, also where reading to the longest would cost more than a
        call."""
        runs: list[tuple[int, int]] = []
        first, longest = 0, 0
        for i in range(self._num_decodes):
            length, n = int(self._lengths[i]), i - first
            joint_cost = (n + 1) * max(longest, length)
            split_cost = n * longest + length + SEGMENT_COST_TOKENS
            if n and (self._slots[i] != self._slots[i - 1] + 1 or joint_cost > split_cost):
                runs.append((first, i))
                first, longest = i, 0
            longest = max(longest, length)
        if self._num_decodes:
            runs.append((first, self._num_decodes))
        return runs

    def _work_for(self, window: int | None) -> tuple[list[Segment], list[Chunk]]:
        if window is not None and window >= self._longest:
            window = None
        work = self._work.get(window)
        if work is None:
            work = self._work[window] = (
                [self._segment(a, b, window) for a, b in self._segments_of_decodes],
                self._chunks(window),
            )
        return work

    def _segment(self, a: int, b: int, window: int | None) -> Segment:
        ends = self._lengths[a:b]
        starts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        lo, hi = int(starts.min()), int(ends.max())
        mask = None
        if int(ends.min()) != hi or int(starts.max()) != lo:
            at = np.arange(lo, hi)
            allowed = (at < ends[:, None]) & (at >= starts[:, None])
            mask = torch.from_numpy(allowed[:, None, None, :]).to(self._device)
        return Segment(a, b, self._slots[a], lo, hi, mask)

    def _chunks(self, window: int | None) -> list[Chunk]:
        chunks, a = [], self._num_decodes
        for row, slot in zip(self._rows[a:], self._slots[a:], strict=True):
            hi = row.start + row.num_tokens
            lo = max(0, row.start - window + 1) if window else 0
            mask = causal_mask(row.start, hi, lo, window, self._device)
            chunks.append(Chunk(a, a + row.num_tokens, slot, lo, hi, mask))
            a += row.num_tokens
        return chunks

    def _index(self, views: LayerViews, dim: int) -> Any:
        """Return where each token's heads go, [T * Hkv] row numbers of width ``dim``."""
        heads, key = views.shape.num_kv_heads, (views.shape.num_kv_heads, dim, views.slot_elements)
        index = self._indexes.get(key)
        if index is None:
            token = self._row_slots * (views.slot_elements // dim) + self._positions
            flat = (token[:, None] + np.arange(heads, dtype=np.int64) * self._S).reshape(-1)
            index = self._indexes[key] = torch.from_numpy(flat).to(self._device)
        return index

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend``."""
        views = self._layers[layer]
        shape = views.shape
        views.k_rows.index_copy_(0, self._index(views, shape.key_dim), _rows(k, shape.key_dim))
        views.v_rows.index_copy_(0, self._index(views, shape.value_dim), _rows(v, shape.value_dim))
        segments, chunks = self._work_for(args.window)
        H, T = q.shape[1], q.shape[2]
        if not chunks and len(segments) == 1:
            return _decode(views, segments[0], q, args).view(1, T, H, -1)
        out = q.new_empty((1, T, H, shape.value_dim))
        for segment in segments:
            out[0, segment.a : segment.b] = _decode(views, segment, q, args).flatten(1, 2)
        for chunk in chunks:
            k, v = (cube[chunk.slot, :, chunk.lo : chunk.hi] for cube in (views.k, views.v))
            out[0, chunk.a : chunk.b] = prefill(k, v, q[0, :, chunk.a : chunk.b], chunk.mask, args)
        return out

    def attend_latent(self, layer: int, q: Any, kept: Any, projections: Projections, args: AttentionArgs) -> Any:
        """See ``AttentionPlan.attend_latent``."""
        views = self._layers[layer]
        width = views.shape.key_dim
        views.k_rows.index_copy_(0, self._index(views, width), _rows(kept, width))
        segments, chunks = self._work_for(args.window)
        H, n = q.shape[1], self._num_decodes
        out = q.new_empty((1, q.shape[2], H, projections.form.value_dim))
        if n:
            absorbed = projections.absorbed(q[0, :, :n], 0)[None]
            sums = [_decode(views, part, absorbed, args)[:, 0] for part in segments]
            out[0, :n] = projections.values(sums[0] if len(sums) == 1 else torch.cat(sums), 0)
        for chunk in chunks:
            out[0, chunk.a : chunk.b] = attend_latent_prefill(
                views.k[chunk.slot, :, chunk.lo : chunk.hi],
                q[0, :, chunk.a : chunk.b],
                chunk.a,
                chunk.mask,
                projections,
                args,
            )
        return out


def causal_mask(start: int, stop: int, lo: int, window: int | None, device: Any) -> Any:
    """Return which of the tokens ``[lo, stop)`` those of ``[start, stop)`` see; None if the mask is plainly causal."""
    if not start and (not window or stop <= window):
        return None
    query, at = np.arange(start, stop)[:, None], np.arange(lo, stop)
    allowed = at <= query
    if window:
        allowed &= at > query - window
    return torch.from_numpy(allowed).to(device)


def _rows(x: Any, dim: int) -> Any:
    """Reshape [1, Hkv, T, D] to [T * Hkv, D], a view if the projection's output is laid out by token."""
    return x[0].transpose(0, 1).reshape(-1, dim)


def _decode(views: LayerViews, part: Segment, q: Any, args: AttentionArgs) -> Any:
    """Attend the single tokens of a segment: → [B, Hkv, group, Dv]."""
    Hkv = views.shape.num_kv_heads
    packed = q[0, :, part.a : part.b].transpose(0, 1).reshape(part.b - part.a, Hkv, -1, q.shape[-1])
    stop = part.slot + part.b - part.a
    k = views.k[part.slot : stop, :, part.lo : part.hi]
    v = views.v[part.slot : stop, :, part.lo : part.hi]
    if not args.is_plain:
        sinks = None if args.sinks is None else args.sinks.view(1, Hkv, -1, 1)
        return attend_unfused(packed, k, v, part.mask, args._replace(sinks=sinks))
    return F.scaled_dot_product_attention(packed, k, v, attn_mask=part.mask, scale=args.scaling)


def attend_latent_prefill(
    kept: Any, q: Any, first: int, mask: Any, projections: Projections, args: AttentionArgs
) -> Any:
    """Attend a chunk to the latents of its sequence [1, L, R + P]: q [H, n, N + P] from row ``first`` on → [n, H,
    Dv]."""
    n, length, form = q.shape[1], kept.shape[1], projections.form
    if not form.prefers_expanded(n, length):
        sums = prefill(kept, kept, projections.absorbed(q, first), mask, args)
        return projections.values(sums, first)
    out = q.new_empty((n, q.shape[0], form.value_dim))
    for heads in projections.head_groups(length):
        k, v = projections.expanded(kept[0], first, heads)
        out[:, heads] = prefill(k, v, q[heads], mask, args)[..., : form.value_dim]
    return out


def prefill(k: Any, v: Any, q: Any, mask: Any, args: AttentionArgs) -> Any:
    """Attend a chunk: k, v [Hkv, L, D], q [H, n, D] → [n, H, Dv]. Heads of a group share K and V by a stride of zero,
    which costs nothing if n is large."""
    Hkv, (n, D) = k.shape[0], q.shape[1:]
    grouped = q.reshape(Hkv, -1, n, D)
    group = grouped.shape[1]
    if not args.is_plain:
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        packed = grouped.reshape(Hkv, group * n, D)
        sinks = args.sinks
        if sinks is not None:
            sinks = sinks.view(Hkv, group, 1).expand(-1, -1, n).reshape(Hkv, group * n, 1)
        out = attend_unfused(packed, k, v, mask.repeat(group, 1), args._replace(sinks=sinks)).view(Hkv, group, n, -1)
    else:
        many_k = k.unsqueeze(1).expand(-1, group, -1, -1)
        many_v = v.unsqueeze(1).expand(-1, group, -1, -1)
        out = F.scaled_dot_product_attention(
            grouped, many_k, many_v, attn_mask=mask, is_causal=mask is None, scale=args.scaling
        )
    return out.reshape(Hkv * group, n, -1).transpose(0, 1)


def attend_unfused(q: Any, k: Any, v: Any, mask: Any, args: AttentionArgs) -> Any:
    """Attend without a fused kernel, as a fallback for softcap and attention sinks. Sinks, in the shape of a column of
    scores, are one more score per row, which takes its share of the softmax but has no value."""
    scaling, _, softcap, sinks = args
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores * scaling if softcap is None else torch.tanh(scores * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    parts = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(parts if sinks is None else parts[..., :-1], v)
