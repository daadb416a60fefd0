"""Runs a BERT-like encoder in one native call, from token ids to hidden states.

It is used if the model is one of ``ENCODERS``, float32 on CPU, and all linears of its layers are ``NativeWeight``. The
embedder compares the result with the model's own at load, before it answers any request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..native import library
from ..native.library import LANES, NotNative
from ..native.weight import NativeWeight
from .decoder_forms import at
from .native_decoder import check_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The places of the parts in encoders of one kind.

    ``linears``: a layer's q (with k and v; ``fused``: the three are one linear), o, up, down. ``norms``: those of its
    attention and its MLP, after them or, with ``norms_before``, before them. ``positions``: the table added to words.
    ``last``: a norm after all layers. ``rotary``: the module for rotary positions. ``gated``: up includes a gate."""

    layers: str = "encoder.layer"
    words: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    norm: str = "embeddings.LayerNorm"
    attention: str
    linears: tuple[str, str, str, str]
    fused: bool = False
    norms: tuple[str, str]
    norms_before: bool = False
    last: str | None = None
    rotary: str | None = None
    gated: bool = False


BERT = Form(
    attention="attention.self",
    linears=("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
DISTILBERT = Form(
    layers="transformer.layer",
    attention="attention",
    linears=("attention.q_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    norms=("sa_layer_norm", "output_layer_norm"),
)
MPNET = Form(
    attention="attention.attn",
    linears=("attention.attn.q", "attention.attn.o", "intermediate.dense", "output.dense"),
    norms=("attention.LayerNorm", "output.LayerNorm"),
)
MODERNBERT = Form(
    layers="layers",
    words="embeddings.tok_embeddings",
    positions=None,
    norm="embeddings.norm",
    attention="attn",
    linears=("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    fused=True,
    norms=("attn_norm", "mlp_norm"),
    norms_before=True,
    last="final_norm",
    rotary="rotary_emb",
    gated=True,
)
ENCODERS = {
    "BertModel": BERT,
    "RobertaModel": BERT,
    "XLMRobertaModel": BERT,
    "CamembertModel": BERT,
    "ElectraModel": BERT,
    "DistilBertModel": DISTILBERT,
    "MPNetModel": MPNET,
    "ModernBertModel": MODERNBERT,
}
ROTATIONS = ("default", "linear")  # rope types that do not depend on a sequence's length
Pair = tuple[torch.Tensor | None, torch.Tensor | None]  # weight and bias of a norm


class NativeEncoder:
    """A native encoder. ``position_offset`` is the number of a text's first position. ``typed``: tokens may be of the
    second type."""

    def __init__(
        self,
        model: Any,
        form: Form,
        packed: Sequence[Sequence[NativeWeight]],
        position_offset: int,
        *,
        typed: bool = False,
    ) -> None:
        found = library.library()
        if found is None:
            raise RuntimeError("the native kernels are not available")
        self._library = found
        layers = at(model, form.layers)
        head_dim, scaling = _heads(at(layers[0], form.attention))
        words, positions = _tables(model, form, position_offset, typed=typed)
        first = _norm(at(model, form.norm))
        last = (None, None) if form.last is None else _norm(at(model, form.last))
        norms = [[_norm(at(layer, name)) for name in form.norms] for layer in layers]
        kinds, cos, sin = _rotations(model, form)
        bias = _position_bias(model, position_offset)
        max_length = max(
            (table.shape[1] // per for table, per in ((cos, 1), (bias, 2)) if table is not None), default=0
        )
        self._kept = [packed, words, positions, first, last, norms, cos, sin, bias]
        self._vocabulary = len(at(model, form.words).weight)
        self._is_typed = len(words) > self._vocabulary
        self.hidden_size = words.shape[1]
        shape = library.EncoderShape(
            hidden=self.hidden_size,
            heads=packed[0][1].in_features // head_dim,
            head_dim=head_dim,
            intermediate=packed[0][3].in_features,
            layers=len(layers),
            max_length=max_length,
            eps=at(model, form.norm).eps,
            scaling=scaling,
            norms_before=form.norms_before,
            gated=form.gated,
        )
        each = [
            library.EncoderLayer(
                *(weight.handle for weight in weights),
                *(library.Norm(*map(_pointer, norm)) for norm in pair),
                getattr(at(layer, form.attention), "sliding_window", None) or 0,
                kinds.index(layer.attention_type) if kinds else -1,
            )
            for layer, weights, pair in zip(layers, packed, norms, strict=True)
        ]
        embeddings = library.EncoderEmbeddings(
            words=words.data_ptr(),
            positions=_pointer(positions),
            norm=library.Norm(*map(_pointer, first)),
            last=library.Norm(*map(_pointer, last)),
            cos=_pointer(cos),
            sin=_pointer(sin),
            bias=_pointer(bias),
        )
        self._handle = found.mlflow_llm_encoder_new(shape, embeddings, (library.EncoderLayer * len(each))(*each))
        library.free_with(self, found.mlflow_llm_encoder_free, self._handle)

    def run(
        self,
        token_ids: np.ndarray[Any, np.dtype[np.int32]],
        lengths: Sequence[int],
        token_types: np.ndarray[Any, np.dtype[np.int32]] | None = None,
    ) -> torch.Tensor:
        """Run texts of these lengths, laid out in a row; return their hidden states [T, H].

        No text may be longer than the model takes. Raises ``IndexError`` for a token outside the vocabulary, and for
        token types if the encoder is not ``typed``."""
        if token_ids.min() < 0 or token_ids.max() >= self._vocabulary:
            raise IndexError(f"token ids must be in 0..{self._vocabulary - 1}")
        if token_types is not None:
            if not self._is_typed:
                raise IndexError("the model was loaded without its second type of tokens")
            token_ids = token_ids + token_types * np.int32(self._vocabulary)
        counts = np.array(lengths, dtype=np.int32)
        hidden = torch.empty((len(token_ids), self.hidden_size), dtype=torch.float32)
        self._library.mlflow_llm_encoder_run(
            self._handle, token_ids.ctypes.data, counts.ctypes.data, len(counts), hidden.data_ptr()
        )
        return hidden


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _heads(attention: Any) -> tuple[int, float]:
    """Return the heads' width, and the factor on attention scores."""
    width = int(getattr(attention, "attention_head_size", 0) or attention.head_dim)
    return width, float(getattr(attention, "scaling", width**-0.5))


def _norm(module: Any) -> Pair:
    """Return weight and bias of a LayerNorm, with a bias of zeros if it has none; of an identity (None, None)."""
    if isinstance(module, nn.Identity):
        return None, None
    weight = module.weight.detach()
    return weight, torch.zeros_like(weight) if module.bias is None else module.bias.detach()


def _tables(model: Any, form: Form, position_offset: int, *, typed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tables of words, and of positions from ``position_offset`` on with the first token type added.

    ``typed``: the words come a second time, as tokens of the second type, since the kernels know only words."""
    words = at(model, form.words).weight
    if form.positions is None:
        return words.contiguous(), None
    module = at(model, "embeddings.token_type_embeddings")
    types = None if module is None else module.weight
    positions = at(model, form.positions).weight[position_offset:]
    if types is not None:
        positions = positions + types[0]
    if typed and types is not None and len(types) > 1:
        words = torch.cat([words, words + (types[1] - types[0])])
    return words.contiguous(), positions.contiguous()


@torch.inference_mode()  # as the model was made
def _rotations(model: Any, form: Form) -> tuple[list[str], torch.Tensor | None, torch.Tensor | None]:
    """Return the kinds of layers, and the cosines and sines of each [kinds, positions, width / 2]."""
    if form.rotary is None:
        return [], None, None
    rotary, config = at(model, form.rotary), model.config
    kinds = list(rotary.layer_types)
    places, like = torch.arange(config.max_position_embeddings)[None], at(model, form.words).weight[:1, None]
    both = [rotary(like, places, kind) for kind in kinds]
    half = both[0][0].shape[-1] // 2
    cos, sin = (torch.stack([pair[i][0, :, :half] for pair in both]).contiguous() for i in range(2))
    return kinds, cos, sin


def _position_bias(model: Any, position_offset: int) -> torch.Tensor | None:
    """Return the bias on scores by the distance of key and query, from ``max_length`` before to ``max_length`` after,
    [heads, 2 max_length]; None if the encoder has no such table."""
    table = at(model, "encoder.relative_attention_bias")
    if table is None:
        return None
    max_length = model.config.max_position_embeddings - position_offset
    buckets = model.encoder.relative_position_bucket(torch.arange(-max_length, max_length))
    bias: torch.Tensor = table.weight.detach()[buckets].t().contiguous()
    return bias


def may_run_in_bf16(model: nn.Module, device: torch.device) -> bool:
    """Return whether it is worth trying to run a model natively with its linears in bfloat16 and the rest in
    float32."""
    return device.type == "cpu" and library.has_bf16() and type(model).__name__ in ENCODERS


def native_encoder(model: nn.Module, position_offset: int, *, typed: bool = False) -> NativeEncoder:
    """Make the native encoder of a model whose linears are already packed. Raises ``NotNative``."""
    found = library.required()
    check_plain(model)
    form = ENCODERS.get(type(model).__name__)
    layers = None if form is None else at(model, form.layers)
    if form is None or not type(model).__module__.startswith("transformers.models.") or not layers:
        raise NotNative(f"a native run does not support its architecture, {type(model).__name__}")
    config: Any = model.config
    named = (getattr(config, name, None) for name in ("hidden_act", "activation", "hidden_activation"))
    activation = next((name for name in named if name), None)
    decodes = getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False)
    if activation != "gelu" or decodes:
        raise NotNative(f"a native run needs an encoder with gelu; this model has {activation} or decodes")
    if hasattr(model, "embeddings_project"):
        raise NotNative("its words are projected to another width, which a native run does not support")
    kinds = {} if form.rotary is None else at(model, form.rotary).rope_type
    if unknown := set(kinds.values()) - set(ROTATIONS):
        raise NotNative(f"a native run does not support rotations of type {', '.join(sorted(unknown))}")
    head_dim, _ = _heads(at(layers[0], form.attention))
    if not found.mlflow_llm_can_attend(head_dim, 1):
        raise NotNative(f"a native run does not support heads of {head_dim}")
    packed = [_packed(form, layer) for layer in layers]
    if any(weights is None for weights in packed):
        raise NotNative(f"some of its layers have widths that are not multiples of {LANES}, or another form")
    whole = [weights for weights in packed if weights is not None]
    return NativeEncoder(model, form, whole, position_offset, typed=typed)


def _packed(form: Form, layer: Any) -> tuple[NativeWeight, ...] | None:
    groups = [at(layer, name).group for name in form.linears]
    weights = tuple(group.packed for group in groups)
    inner = weights[3].in_features
    fits = [len(group.sizes) for group in groups] == [1 if form.fused else 3, 1, 1, 1]
    fits = fits and inner % LANES == 0 and weights[2].out_features == (2 * inner if form.gated else inner)
    tensors = [one for name in form.norms for one in _norm(at(layer, name)) if one is not None]
    fits = fits and all(one.dtype == torch.float32 for one in tensors)
    return weights if fits and all(isinstance(weight, NativeWeight) for weight in weights) else None
