"""A whole step of a Llama-like decoder in one native call, in place of transformers' model code.

Taken where the model is one of ``DECODERS``, float32 on CPU, and every linear of its layers is a ``NativeWeight``;
the self-test at load compares it with the model's own logits like every other way of running. A token's logits are
bitwise the same whatever else is in the step, however its prompt was cut into chunks, and on any number of threads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .kv_cache import Row
from .linear import EngineLinear
from .native import library
from .native.adapters import AdapterTables, Pool
from .native.library import LANES, NotNative
from .native.weight import NativeWeight
from .self_test import LayerUse
from .slot_cache import SlotKVCache
from .virtual_tokens import VirtualTokens

# Layers of one form: norm, attention, residual; norm, gated silu MLP, residual; rotation of the whole head by halves.
DECODERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
MORE_POSITIONS = 1024  # the table of rotations grows by at least this many


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms [hidden] and packed linears of one layer; ``window`` in tokens, 0 for none."""

    norms: tuple[torch.Tensor, torch.Tensor]
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    qkv: NativeWeight
    o: NativeWeight
    gate_up: NativeWeight
    down: NativeWeight
    window: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What a native decoder reads, all of it kept alive here. ``prefix`` names the layers as LoRA does."""

    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor
    norm: torch.Tensor
    head: NativeWeight
    rotary: Any
    prefix: str
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float


def decoder_weights(model: nn.Module, uses: Sequence[LayerUse]) -> DecoderWeights:
    """The weights of ``model``. ``uses``: what its layers ask of the attention. Raises ``NotNative``."""
    found = library.required()
    body: Any = getattr(model, "model", None)
    head = model.get_output_embeddings()
    layers = getattr(body, "layers", None)
    other = NotNative(f"its architecture is not among those of a native step: {type(model).__name__}")
    if not isinstance(layers, nn.ModuleList) or not isinstance(head, EngineLinear) or not _known(layers):
        raise other
    check_plain(model)
    attention = layers[0].self_attn
    head_dim = int(attention.head_dim)
    kv_heads = attention.k_proj.out_features // head_dim
    group = attention.q_proj.out_features // head_dim // kv_heads
    config = model.config.get_text_config()
    if config.hidden_act != "silu":
        raise NotNative(f"its activation is {config.hidden_act}, a native step knows silu")
    if not found.mlt_can_attend(head_dim, group):
        raise NotNative(f"heads of {head_dim} in groups of {group} are not among those of a native step")
    if len({use.scaling for use in uses}) != 1 or any(use.softcap is not None for use in uses):
        raise NotNative("its attention scales or caps scores in a way that a native step does not know")
    each = [_layer_weights(layer, use.window) for layer, use in zip(layers, uses, strict=True)]
    packed = head.group.packed
    embedding = body.embed_tokens.weight
    if any(layer is None for layer in each) or not isinstance(packed, NativeWeight) or not _plain(embedding):
        raise NotNative(f"some of its layers have widths that are no multiple of {LANES}, or another form")
    return DecoderWeights(
        layers=tuple(layer for layer in each if layer is not None),
        embedding=embedding.detach(),
        norm=body.norm.weight.detach(),
        head=packed,
        rotary=body.rotary_emb,
        prefix=next(name for name, module in model.named_modules() if module is layers),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config.rms_norm_eps),
        scaling=uses[0].scaling,
    )


def may_run_in_bf16(model: nn.Module, device: torch.device) -> bool:
    """Whether it is worth a try to run a model in bfloat16 natively: linears, and keys and values where tiles are, in
    bfloat16, all between them in float32."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return device.type == "cpu" and library.has_bf16() and isinstance(layers, nn.ModuleList) and _known(layers)


def _known(layers: nn.ModuleList) -> bool:
    names = {type(layer).__name__ for layer in layers}
    return len(names) == 1 and names <= DECODERS and type(layers[0]).__module__.startswith("transformers.models.")


def check_plain(model: nn.Module) -> None:
    """Raises ``NotNative`` for a model in another precision, or elsewhere, than the kernels take."""
    like = next(model.parameters())
    if like.device.type != "cpu":
        raise NotNative(f"the model is on {like.device}, they are for processors")
    if like.dtype != torch.float32:
        raise NotNative(f"dtype is {str(like.dtype).removeprefix('torch.')}, they take float32 (and int8 linears)")


def _plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return on_cpu and tensor.is_contiguous() and tensor.shape[-1] % LANES == 0


def _layer_weights(layer: Any, window: int | None) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    groups = [attention.q_proj.group, attention.o_proj.group, mlp.gate_proj.group, mlp.down_proj.group]
    if [len(group.sizes) for group in groups] != [3, 1, 2, 1]:
        return None
    packed = [group.packed for group in groups]
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    if not all(isinstance(weight, NativeWeight) for weight in packed) or not all(map(_plain, norms)):
        return None
    if mlp.down_proj.in_features % LANES:
        return None
    head_norms = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    qkv, o, gate_up, down = packed
    return LayerWeights(norms, (head_norms[0], head_norms[1]), qkv, o, gate_up, down, window or 0)


class NativeDecoder:
    """A ``StepForward`` (runner.py): ``weights`` over the slots of ``cache``, with the adapters of ``pool``."""

    wants_decodes_together = False

    def __init__(self, weights: DecoderWeights, cache: SlotKVCache, pool: Pool | None = None) -> None:
        found = library.library()
        if found is None:
            raise RuntimeError("the native kernels are not available")
        self._library = found
        self._weights, self._cache = weights, cache
        self._cos = self._sin = torch.empty(0, weights.head_dim // 2)
        self._adapters = (
            None if pool is None else AdapterTables(pool, weights.prefix, len(weights.layers), _factor_dtype(weights))
        )
        shape = library.Shape(
            hidden=weights.embedding.shape[1],
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            intermediate=weights.layers[0].down.in_features,
            layers=len(weights.layers),
            slot_tokens=cache.slot_tokens,
            slot_elements=cache.slot_elements,
            eps=weights.eps,
            scaling=weights.scaling,
            bf16_kv=cache.dtype == torch.bfloat16,
        )
        layers = [_layer(layer, offset) for layer, offset in zip(weights.layers, cache.layer_offsets, strict=True)]
        self._handle = found.mlt_decoder_new(
            shape,
            (library.Layer * len(layers))(*layers),
            weights.embedding.data_ptr(),
            weights.norm.data_ptr(),
            weights.head.handle,
        )
        weakref.finalize(self, found.mlt_decoder_free, self._handle)

    def forward(
        self,
        ids: Any,
        rows: Sequence[Row],
        adapters: Sequence[str | None],
        kept: Sequence[int],
        virtual: VirtualTokens | None = None,
    ) -> torch.Tensor:
        """See ``StepForward.forward``."""
        numbers, tables = [-1] * len(rows), None
        if self._adapters is not None:
            numbers, tables = self._adapters.numbered(adapters)
        self._rotate_up_to(max(row.start + row.num_tokens for row in rows))
        slots = [self._cache.slot_of(row.owner) for row in rows]
        runs = np.array(
            [(s, r.start, r.num_tokens, n) for s, r, n in zip(slots, rows, numbers, strict=True)], dtype=np.int32
        )
        wanted = np.array(kept, dtype=np.int32)
        logits = torch.empty(len(kept), self._weights.head.out_features)
        step = library.Step(
            runs=runs.ctypes.data,
            num_runs=len(runs),
            num_tokens=len(ids),
            ids=ids.ctypes.data,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            slab=self._cache.slab_address,
            adapters=ctypes.addressof(tables) if tables is not None else None,
            kept=wanted.ctypes.data,
            num_kept=len(wanted),
            logits=logits.data_ptr(),
        )
        if virtual is not None:
            pointers = virtual.pointers(len(ids))
            step.vectors = pointers.ctypes.data
        self._library.mlt_decoder_step(self._handle, step)
        return logits

    def _rotate_up_to(self, longest: int) -> None:
        """Cosines and sines [positions, D / 2] by the model's own module, for the positions that came up so far."""
        if longest <= len(self._cos):
            return
        count = max(longest, len(self._cos) + MORE_POSITIONS)
        cos, sin = self._weights.rotary(self._weights.embedding[:1, None], torch.arange(count)[None])
        half = self._weights.head_dim // 2
        self._cos, self._sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _layer(weights: LayerWeights, kv_offset: int) -> library.Layer:
    q_norm, k_norm = (None if norm is None else norm.data_ptr() for norm in weights.head_norms)
    return library.Layer(
        norm1=weights.norms[0].data_ptr(),
        norm2=weights.norms[1].data_ptr(),
        q_norm=q_norm,
        k_norm=k_norm,
        qkv=weights.qkv.handle,
        o=weights.o.handle,
        gate_up=weights.gate_up.handle,
        down=weights.down.handle,
        window=weights.window,
        kv_offset=kv_offset,
    )


def _factor_dtype(weights: DecoderWeights) -> torch.dtype:
    """What adapters are kept in: bfloat16 beside linears that are rounded already, which halves what a step reads."""
    return torch.float32 if weights.layers[0].qkv.kind == library.F32 else torch.bfloat16
