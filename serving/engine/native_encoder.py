"""A BERT-like encoder in one native call, from token ids to hidden states.

Taken where the model is one of ``ENCODERS``, float32 on CPU, and every linear of them is a ``NativeWeight``. The
embedder compares the result with the model's own before anyone is answered with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .decoder_forms import at
from .native import library
from .native.library import LANES, NotNative
from .native.weight import NativeWeight
from .native_decoder import check_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Where things stand in encoders of one kind: words, positions and types are added, then a norm; layers of
    attention, residual, norm; GELU MLP, residual, norm. ``linears`` of a layer: q (with k and v), o, up, down."""

    layers: str
    attention: str
    linears: tuple[str, str, str, str]
    norms: tuple[str, str]


BERT = Form(
    layers="encoder.layer",
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
ENCODERS = {
    "BertModel": BERT,
    "RobertaModel": BERT,
    "XLMRobertaModel": BERT,
    "CamembertModel": BERT,
    "ElectraModel": BERT,
    "DistilBertModel": DISTILBERT,
}


class NativeEncoder:
    """``position_offset`` is the number of a text's first position; ``typed``: tokens may be of the second type."""

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
        attention = at(layers[0], form.attention)
        norms = [[at(layer, name) for name in form.norms] for layer in layers]
        tables = _tables(model.embeddings, position_offset, typed=typed)
        self._kept = [packed, tables, [(norm.weight, norm.bias) for pair in norms for norm in pair]]
        self._vocabulary = len(model.embeddings.word_embeddings.weight)
        self._is_typed = len(tables[0]) > self._vocabulary
        self.hidden_size = tables[0].shape[1]
        shape = library.EncoderShape(
            hidden=self.hidden_size,
            heads=packed[0][1].in_features // attention.attention_head_size,
            head_dim=attention.attention_head_size,
            intermediate=packed[0][2].out_features,
            layers=len(layers),
            eps=norms[0][0].eps,
            scaling=attention.scaling,
        )
        each = [
            library.EncoderLayer(
                *(weight.handle for weight in weights),
                *(tensor.data_ptr() for norm in pair for tensor in (norm.weight, norm.bias)),
            )
            for weights, pair in zip(packed, norms, strict=True)
        ]
        embeddings = library.EncoderEmbeddings(*(table.data_ptr() for table in tables))
        self._handle = found.mlt_encoder_new(shape, embeddings, (library.EncoderLayer * len(each))(*each))
        library.free_with(self, found.mlt_encoder_free, self._handle)

    def run(
        self,
        token_ids: np.ndarray[Any, np.dtype[np.int32]],
        lengths: Sequence[int],
        token_types: np.ndarray[Any, np.dtype[np.int32]] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, H] of texts of these lengths side by side, none longer than the model takes. Raises
        ``IndexError`` for a token outside the vocabulary, and for a second type that was not asked for."""
        if token_ids.min() < 0 or token_ids.max() >= self._vocabulary:
            raise IndexError(f"token ids must be in 0..{self._vocabulary - 1}")
        if token_types is not None:
            if not self._is_typed:
                raise IndexError("the model was loaded without its second type of tokens")
            token_ids = token_ids + token_types * np.int32(self._vocabulary)
        counts = np.array(lengths, dtype=np.int32)
        hidden = torch.empty((len(token_ids), self.hidden_size), dtype=torch.float32)
        self._library.mlt_encoder_run(
            self._handle, token_ids.ctypes.data, counts.ctypes.data, len(counts), hidden.data_ptr()
        )
        return hidden


def _tables(embeddings: Any, position_offset: int, *, typed: bool) -> tuple[torch.Tensor, ...]:
    """Words, positions from ``position_offset`` on with the first type added, the norm's weight and bias.

    ``typed``: all words stand there once more, as tokens of the second type: the kernels know of words alone."""
    module = getattr(embeddings, "token_type_embeddings", None)
    types = None if module is None else module.weight
    positions = embeddings.position_embeddings.weight[position_offset:]
    if types is not None:
        positions = positions + types[0]
    norm, words = embeddings.LayerNorm, embeddings.word_embeddings.weight
    if typed and types is not None and len(types) > 1:
        words = torch.cat([words, words + (types[1] - types[0])])
    return words.contiguous(), positions.contiguous(), norm.weight, norm.bias


def native_encoder(model: nn.Module, position_offset: int, *, typed: bool = False) -> NativeEncoder:
    """Of a model whose linears are packed already. Raises ``NotNative``."""
    found = library.required()
    check_plain(model)
    form = ENCODERS.get(type(model).__name__)
    layers = None if form is None else at(model, form.layers)
    if form is None or not type(model).__module__.startswith("transformers.models.") or not layers:
        raise NotNative(f"its architecture is not among those of a native run: {type(model).__name__}")
    config: Any = model.config
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation", None)
    decodes = getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False)
    if activation != "gelu" or decodes:
        raise NotNative(f"a native run knows encoders with gelu, this model has {activation} or decodes")
    if hasattr(model, "embeddings_project"):
        raise NotNative("its words are projected to another width, which a native run does not know")
    head_dim = at(layers[0], form.attention).attention_head_size
    if not found.mlt_can_attend(head_dim, 1):
        raise NotNative(f"heads of {head_dim} are not among those of a native run")
    packed = [_packed(form, layer) for layer in layers]
    if any(weights is None for weights in packed):
        raise NotNative(f"some of its layers have widths that are no multiple of {LANES}, or another form")
    whole = [weights for weights in packed if weights is not None]
    return NativeEncoder(model, form, whole, position_offset, typed=typed)


def _packed(form: Form, layer: Any) -> tuple[NativeWeight, ...] | None:
    groups = [at(layer, name).group for name in form.linears]
    weights = tuple(group.packed for group in groups)
    fits = [len(group.sizes) for group in groups] == [3, 1, 1, 1] and weights[2].out_features % LANES == 0
    norms = [at(layer, name) for name in form.norms]
    fits = fits and all(norm.weight.dtype == torch.float32 and norm.bias is not None for norm in norms)
    return weights if fits and all(isinstance(weight, NativeWeight) for weight in weights) else None
