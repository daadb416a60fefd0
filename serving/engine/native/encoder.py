"""The layers of a BERT-like encoder in one native call; its embeddings stay transformers' own code.

Taken where the model is one of ``ENCODERS``, float32 on CPU, and every linear of them is a ``NativeWeight``. The
embedder compares the result with the model's own before anyone is answered with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from . import library
from .library import LANES
from .weight import NativeWeight

# Layers of one form: attention, residual, norm; GELU MLP, residual, norm; positions in the embeddings alone.
ENCODERS = {"BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel"}


class NativeEncoder:
    def __init__(self, layers: Sequence[Any], packed: Sequence[Sequence[NativeWeight]]) -> None:
        found = library.library()
        if found is None:
            raise RuntimeError("the native kernels are not available")
        self._library = found
        attention = layers[0].attention.self
        norms = [(layer.attention.output.LayerNorm, layer.output.LayerNorm) for layer in layers]
        self._kept = [packed, [(norm.weight, norm.bias) for pair in norms for norm in pair]]
        shape = library.EncoderShape(
            hidden=packed[0][0].in_features,
            heads=attention.num_attention_heads,
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
        self._handle = found.mlt_encoder_new(shape, (library.EncoderLayer * len(each))(*each))
        weakref.finalize(self, found.mlt_encoder_free, self._handle)

    def run(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """``hidden`` [T, H], the embeddings of sequences of these lengths side by side, through all layers in place."""
        counts = np.array(lengths, dtype=np.int32)
        self._library.mlt_encoder_run(self._handle, counts.ctypes.data, len(counts), hidden.data_ptr())
        return hidden


def native_encoder(model: nn.Module) -> NativeEncoder | None:
    """Of a model whose linears are packed already; None where it cannot run natively."""
    found = library.library()
    layers: Any = getattr(getattr(model, "encoder", None), "layer", None)
    known = type(model).__name__ in ENCODERS and type(model).__module__.startswith("transformers.models.")
    if found is None or not known or not layers:
        return None
    config: Any = model.config
    if config.hidden_act != "gelu" or config.is_decoder or config.add_cross_attention:
        return None
    if not found.mlt_can_attend(layers[0].attention.self.attention_head_size, 1):
        return None
    packed = [_packed(layer) for layer in layers]
    if any(weights is None for weights in packed):
        return None
    return NativeEncoder(layers, [weights for weights in packed if weights is not None])


def _packed(layer: Any) -> tuple[NativeWeight, ...] | None:
    groups = [
        layer.attention.self.query.group,
        layer.attention.output.dense.group,
        layer.intermediate.dense.group,
        layer.output.dense.group,
    ]
    weights = tuple(group.packed for group in groups)
    fits = [len(group.sizes) for group in groups] == [3, 1, 1, 1] and weights[2].out_features % LANES == 0
    norms = layer.attention.output.LayerNorm, layer.output.LayerNorm
    fits = fits and all(norm.weight.dtype == torch.float32 and norm.bias is not None for norm in norms)
    return weights if fits and all(isinstance(weight, NativeWeight) for weight in weights) else None
