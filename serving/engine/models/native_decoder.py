"""Runs a whole step of a decoder in one native call, in place of transformers' model code.

It is used if the model is one of ``decoder_forms.FORMS``, float32 on CPU, and all linears of its layers are
``NativeWeight``. As for every other way to run a model, the self-test at load compares it with the model's own logits.
A token's logits are bitwise the same whatever else is in the step, however its prompt was cut into chunks, and on any
number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..attention.kv_cache import Row
from ..attention.slot_cache import SlotKVCache
from ..native import library
from ..native.adapters import DOWN, GATE, SHARED_EXPERT_GATE, UP, AdapterTables, K, O, Pool, Q
from ..native.library import LANES, NotNative
from ..native.weight import F32, KINDS, NativeWeight, can_pack
from ..weights.experts import PARAMETERS, EngineExperts
from ..weights.linear import EngineLinear
from .decoder_forms import ACTIVATIONS, ExpertForm, Form, at, form_of
from .step_input import StepInput
from .verification import LayerUse

SPARSEMIXER_TOP_K = 2  # experts per token with SparseMixer, whatever the configuration says
MIN_TABLE_GROWTH = 1024  # the table of rotations grows by at least this many positions
Norm = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias [hidden]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer; a token uses ``top_k`` of ``count``.

    ``shared_expert_gate`` [hidden] gives the weight of the dense MLP beside them. ``jitter_eps``: an expert is weighted
    among those whose scores differ from its own by at most this fraction; None for all."""

    router: NativeWeight
    gate_up: NativeWeight
    down: NativeWeight
    shared_expert_gate: torch.Tensor | None
    count: int
    top_k: int
    normalized: bool
    jitter_eps: float | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The norms and packed linears of one layer, whose modules are ``members``. ``window`` is in tokens, 0 for none.
    ``rotary_table``: index of the model's kind of rotation, -1 for none."""

    members: tuple[str, ...]
    norms: tuple[Norm | None, ...]
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    qkv: NativeWeight
    o: NativeWeight
    gate_up: NativeWeight | None
    down: NativeWeight | None
    experts: ExpertWeights | None
    window: int
    rotary_table: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a native decoder reads, kept alive here. ``prefix`` is the layers' module name, as in LoRA;
    ``rotations`` are the arguments that ``rotary`` takes for each kind."""

    form: Form
    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor
    positions: torch.Tensor | None
    norm: Norm
    head: NativeWeight
    rotary: Any
    rotations: tuple[tuple[str, ...], ...]
    prefix: str
    heads: int
    kv_heads: int
    head_dim: int
    activation: int
    eps: float
    scaling: float
    score_cap: float
    embedding_scale: float
    vector_scale: float
    branch_scale: float
    logit_scale: float
    logit_cap: float
    tied: bool  # the output head's weights are the embedding


def decoder_weights(model: nn.Module, uses: Sequence[LayerUse]) -> DecoderWeights:
    """Collect the weights of ``model``. ``uses``: what its layers ask of the attention. Raises ``NotNative``."""
    found = library.required()
    form, head = form_of(model), model.get_output_embeddings()
    if form is None or not isinstance(head, EngineLinear):
        raise NotNative(f"a native step does not support its architecture, {type(model).__name__}")
    check_plain(model)
    body: Any = getattr(model, form.body)
    layers = getattr(body, form.layers)
    shape = uses[0].shape
    head_dim, kv_heads = shape.key_dim, shape.num_kv_heads
    heads = at(layers[0], form.members[O]).in_features // head_dim
    activation, *others = sorted({form.activation_of(layer) for layer in layers})
    if others or activation not in ACTIVATIONS:
        raise NotNative(f"its activation is {' and '.join([activation, *others])}, but a native step has silu and gelu")
    if not found.mlflow_llm_can_attend(head_dim, heads // kv_heads):
        raise NotNative(f"a native step does not support heads of {head_dim} in groups of {heads // kv_heads}")
    if len({(use.shape, use.scaling, use.softcap) for use in uses}) != 1 or shape.value_dim != head_dim:
        raise NotNative("its layers attend in different ways, which a native step does not support")
    rotary = getattr(body, "rotary_emb", None)
    config = model.config.get_text_config()
    if getattr(config, "clip_qkv", None) is not None:
        raise NotNative("it clips queries, keys and values (clip_qkv), which a native step does not support")
    kinds = getattr(rotary, "layer_types", None)
    each = []
    for index, (layer, use) in enumerate(zip(layers, uses, strict=True)):
        is_rotated = rotary is not None and getattr(at(layer, form.attention), "use_rope", True)
        rotary_table = -1 if not is_rotated else 0 if kinds is None else kinds.index(config.layer_types[index])
        each.append(_layer_weights(form, layer, use.window or 0, rotary_table))
    packed = head.group.packed
    words = getattr(body, form.embedding)
    fits = all(layer is not None for layer in each) and _plain(words.weight)
    if not fits or not isinstance(packed, NativeWeight):
        raise NotNative(f"some of its layers have widths that are not multiples of {LANES}, or another form")
    prefix = next(name for name, module in model.named_modules() if module is layers)
    _refuse_other_linears(form, layers, prefix)
    norm = _norm(form, body, form.norm)
    assert norm is not None, "looked for by its name"
    vector_scale = float(getattr(config, "embedding_multiplier", 1.0))
    return DecoderWeights(
        form=form,
        layers=tuple(layer for layer in each if layer is not None),
        embedding=words.weight.detach(),
        positions=None if form.positions is None else at(body, form.positions).weight.detach(),
        norm=norm,
        head=packed,
        rotary=rotary,
        rotations=((),) if kinds is None else tuple((kind,) for kind in kinds),
        prefix=prefix,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        activation=ACTIVATIONS[activation],
        eps=float(getattr(config, form.eps)),
        scaling=uses[0].scaling,
        score_cap=float(uses[0].softcap or 0.0),
        embedding_scale=float(getattr(words, "scalar_embed_scale", 1.0)) * vector_scale,
        vector_scale=vector_scale,
        branch_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        tied=head.is_tied,
    )


def may_run_in_bf16(model: nn.Module, device: torch.device) -> bool:
    """Return whether it is worth trying to run a model natively in bfloat16: linears, and with tiles keys and values
    too, in bfloat16, the rest in float32."""
    return device.type == "cpu" and library.has_bf16() and form_of(model) is not None


def check_plain(model: nn.Module) -> None:
    """Raise ``NotNative`` for a model in a precision, or on a device, that the kernels do not take."""
    like = next(model.parameters())
    if like.device.type != "cpu":
        raise NotNative(f"the model is on {like.device}, but they run on the CPU")
    if like.dtype != torch.float32:
        raise NotNative(f"dtype is {str(like.dtype).removeprefix('torch.')}, but they take float32 (and int8 linears)")


def _plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return on_cpu and tensor.is_contiguous() and tensor.shape[-1] % LANES == 0


def _norm(form: Form, parent: Any, name: str | None) -> Norm | None:
    if name is None:
        return None
    module = getattr(parent, name)
    bias = getattr(module, "bias", None)
    weight = module.weight.detach()
    return weight + form.norm_offset if form.norm_offset else weight, None if bias is None else bias.detach()


def _layer_weights(form: Form, layer: Any, window: int, rotary_table: int) -> LayerWeights | None:
    names = form.members_of(layer)
    members = [at(layer, name) if name else None for name in names]
    bounds = ((Q, O), (O, GATE), (GATE, DOWN), (DOWN, SHARED_EXPERT_GATE))
    qkv, o, gate_up, down = (_packed(members[first:end]) for first, end in bounds)
    routed = form.experts_of(layer)
    has_mlp = gate_up is not None and down is not None and down.in_features % LANES == 0
    norms = tuple(_norm(form, layer, name) for name in form.norms)
    tensors = [one for norm in norms if norm is not None for one in norm if one is not None]
    if qkv is None or o is None or not (has_mlp or (routed and not any(routed.shared))):
        return None
    experts = None if routed is None else _expert_weights(routed, layer)
    if (routed and experts is None) or not all(map(_plain, tensors)):
        return None
    attention = at(layer, form.attention)
    named = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if one is None else one.weight.detach() + form.norm_offset for one in named)
    return LayerWeights(names, norms, (q_norm, k_norm), qkv, o, gate_up, down, experts, window, rotary_table)


def _packed(members: Sequence[Any]) -> NativeWeight | None:
    """Return the one packed weight of all members that exist; None if they are not packed in one."""
    present = [member for member in members if member is not None]
    if not present or not all(isinstance(member, EngineLinear) for member in present):
        return None
    group = present[0].group
    packed = group.packed
    return packed if len(group.sizes) == len(present) and isinstance(packed, NativeWeight) else None


def _expert_weights(form: ExpertForm, layer: Any) -> ExpertWeights | None:
    """Return the weights of a layer's experts; None if a native step cannot run them. The router is always in
    float32."""
    router, experts, shared_expert_gate = at(layer, form.router), at(layer, form.experts), None
    if not isinstance(experts, EngineExperts) or not can_pack(router.weight):
        return None
    if form.shared[-1]:
        shared_expert_gate = _packed([at(layer, form.shared[-1])])
        if shared_expert_gate is None or shared_expert_gate.bias is not None:
            return None
    gate_up, down = (experts.packed[name] for name in PARAMETERS)
    top_k = SPARSEMIXER_TOP_K if form.sparsemixer else router.top_k
    if not isinstance(gate_up, NativeWeight) or not isinstance(down, NativeWeight) or top_k > experts.num_experts:
        return None
    return ExpertWeights(
        router=NativeWeight(router.weight, None, F32),
        gate_up=gate_up,
        down=down,
        shared_expert_gate=None if shared_expert_gate is None else shared_expert_gate.dense()[0],
        count=experts.num_experts,
        top_k=top_k,
        normalized=bool(getattr(router, "norm_topk_prob", True)),
        jitter_eps=2.0 * router.router_jitter_noise if form.sparsemixer else None,
    )


def _refuse_other_linears(form: Form, layers: Any, prefix: str) -> None:
    """Raise ``NotNative`` for linears that a step would leave out, along with their adapters."""
    for layer in layers:
        known = set(form.members_of(layer))
        for name, module in layer.named_modules():
            if isinstance(module, EngineLinear) and name not in known:
                raise NotNative(f"a native step does not support its linear {module.name.removeprefix(prefix)[1:]}")


class NativeDecoder:
    """A ``StepForward`` (runner.py) with ``weights``, over the slots of ``cache``, with the adapters of ``pool``."""

    wants_decodes_together = False

    def __init__(self, weights: DecoderWeights, cache: SlotKVCache, pool: Pool | None = None) -> None:
        found = library.library()
        if found is None:
            raise RuntimeError("the native kernels are not available")
        self._library = found
        self.weights, self._cache = weights, cache
        self._rotary_dims = _rotary_dims(weights)
        self._cos = self._sin = torch.empty(len(weights.rotations), 0, self._rotary_dims // 2)
        self._adapters = (
            None
            if pool is None
            else AdapterTables(pool, weights.prefix, [one.members for one in weights.layers], _factor_dtype(weights))
        )
        first = weights.layers[0]
        shape = library.Shape(
            hidden=weights.embedding.shape[1],
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            layers=len(weights.layers),
            slot_tokens=cache.slot_tokens,
            slot_elements=cache.slot_elements,
            eps=weights.eps,
            scaling=weights.scaling,
            kv=KINDS[cache.dtype],
            rotary_dims=self._rotary_dims,
            activation=weights.activation,
            gated=weights.form.gated,
            separate_branch=weights.branch_scale != 1.0 or any(weights.form.norms[1::2]),
            norm_all_heads=_norm_all_heads(weights),
            q_columns=weights.heads * weights.head_dim if first.members[K] else first.qkv.out_features,
            fused_gate_up=any(one.members[GATE] and not one.members[UP] for one in weights.layers),
            embedding_scale=weights.embedding_scale,
            vector_scale=weights.vector_scale,
            branch_scale=weights.branch_scale,
            score_cap=weights.score_cap,
            logit_scale=weights.logit_scale if weights.logit_scale != 1.0 else 0.0,
            logit_cap=weights.logit_cap,
            tied=weights.tied,
        )
        layers = [_layer(layer, offset) for layer, offset in zip(weights.layers, cache.layer_offsets, strict=True)]
        self._handle = found.mlflow_llm_decoder_new(
            shape,
            (library.Layer * len(layers))(*layers),
            weights.embedding.data_ptr(),
            None if weights.positions is None else weights.positions.data_ptr(),
            _pointers(weights.norm),
            weights.head.handle,
        )
        library.free_with(self, found.mlflow_llm_decoder_free, self._handle)

    def forward(self, step: StepInput) -> torch.Tensor:
        """See ``StepForward.forward``."""
        rows, virtual = step.rows, step.virtual
        numbers, tables = [-1] * len(rows), None
        if self._adapters is not None:
            numbers, tables = self._adapters.numbered(step.adapters)
        self._rotate_up_to(max(row.start + row.num_tokens for row in rows))
        chunks, parts = self._chunks(rows, numbers)
        ids, wanted = np.ascontiguousarray(step.ids, dtype=np.int64), np.array(step.kept, dtype=np.int32)
        logits = torch.empty(len(wanted), self.weights.head.out_features)
        native = library.Step(
            chunks=chunks.ctypes.data,
            num_chunks=len(chunks),
            num_tokens=len(ids),
            parts=None if parts is None else parts.ctypes.data,
            ids=ids.ctypes.data,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            table_stride=self._cos[0].numel(),
            slab=self._cache.slab_address,
            adapters=ctypes.addressof(tables) if tables is not None else None,
            logit_rows=wanted.ctypes.data,
            num_logit_rows=len(wanted),
            logits=logits.data_ptr(),
        )
        if virtual is not None:
            pointers = virtual.pointers(len(ids))
            native.vectors = pointers.ctypes.data
        self._library.mlflow_llm_decoder_step(self._handle, native)
        return logits

    def _chunks(self, rows: Sequence[Row], adapters: Sequence[int]) -> tuple[Any, Any]:
        """Return the ``chunks`` and ``parts`` of ``library.Step``; ``parts`` is None if no sequence reads another
        slot's."""
        chunks: list[tuple[int, ...]] = []
        parts: list[tuple[int, int]] = []
        for row, adapter in zip(rows, adapters, strict=True):
            slot, first = self._cache.slot_of(row.owner), len(parts)
            if slot.parts:
                parts += [(part.slot.index, part.stop) for part in slot.parts]
            chunks.append((slot.index, row.start, row.num_tokens, adapter, first, len(parts) - first))
        return np.array(chunks, dtype=np.int32), np.array(parts, dtype=np.int32) if parts else None

    def _rotate_up_to(self, num_positions: int) -> None:
        """Extend the cosines and sines [kinds, positions, rotary_dims / 2], made by the model's own module, to
        ``num_positions``. Never go beyond the possible positions, since some kinds of rotation depend on
        their number."""
        known = self._cos.shape[1]
        if num_positions <= known or not self._rotary_dims:
            return
        count = max(num_positions, min(known + MIN_TABLE_GROWTH, self._cache.max_model_len))
        tables = [_rotations(self.weights, count, *kind) for kind in self.weights.rotations]
        half = self._rotary_dims // 2
        self._cos, self._sin = (torch.stack([table[i][0, :, :half] for table in tables]).contiguous() for i in range(2))


@torch.inference_mode()  # as when the model was made, since some rotations write to its buffers
def _rotations(weights: DecoderWeights, count: int, *kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = weights.rotary(
        weights.embedding[:1, None], torch.arange(count)[None], *kind
    )
    return found


def _rotary_dims(weights: DecoderWeights) -> int:
    """Return how many dimensions of a head are rotated; 0 for none."""
    return 0 if weights.rotary is None else _rotations(weights, 1, *weights.rotations[0])[0].shape[-1]


def _norm_all_heads(weights: DecoderWeights) -> bool:
    """Return whether the norm on queries spans all heads together."""
    norm = weights.layers[0].head_norms[0]
    return norm is not None and len(norm) != weights.head_dim


def _pointers(norm: Norm | None) -> library.Norm:
    weight, bias = norm or (None, None)
    return library.Norm(*(None if one is None else one.data_ptr() for one in (weight, bias)))


def _layer(weights: LayerWeights, kv_offset: int) -> library.Layer:
    q_norm, k_norm = (None if norm is None else norm.data_ptr() for norm in weights.head_norms)
    before_attention, after_attention, before_mlp, after_mlp = map(_pointers, weights.norms)
    return library.Layer(
        before_attention=before_attention,
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv=weights.qkv.handle,
        o=weights.o.handle,
        gate_up=None if weights.gate_up is None else weights.gate_up.handle,
        down=None if weights.down is None else weights.down.handle,
        window=weights.window,
        rotary_table=weights.rotary_table,
        kv_offset=kv_offset,
        experts=_experts(weights.experts),
    )


def _experts(weights: ExpertWeights | None) -> library.Experts:
    if weights is None:
        return library.Experts()
    return library.Experts(
        router=weights.router.handle,
        gate_up=weights.gate_up.handle,
        down=weights.down.handle,
        shared_expert_gate=None if weights.shared_expert_gate is None else weights.shared_expert_gate.data_ptr(),
        count=weights.count,
        top_k=weights.top_k,
        normalized=weights.normalized,
        sparsemixer=weights.jitter_eps is not None,
        jitter_eps=weights.jitter_eps or 0.0,
    )


def _factor_dtype(weights: DecoderWeights) -> torch.dtype:
    """Return the type that adapters are kept in: rounded like the linears beside them, since a step's time goes into
    reading."""
    return {kind: dtype for dtype, kind in KINDS.items()}.get(weights.layers[0].qkv.kind, torch.int8)
