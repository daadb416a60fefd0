"""The attention function that transformers' model code calls, and the check of what it is asked for.

It is registered under a name of its own, for which transformers makes no mask. The module that calls it carries its
model's ``ContextHolder``, whose context has the KV cache's plan for this forward.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from ..weights.forward_context import ContextHolder
from . import latent_attention
from .kv_cache import AttentionArgs

NAME = "mlflow_llm"
HOLDER = "mlflow_llm_context"

RECURRENT = "it keeps a recurrent state, which is no KV cache"  # of models that are no transformers, or not alone

# Keyword arguments that change the result and that the plans do not implement: models that send them are refused.
UNKNOWN = ("position_bias", "head_mask", "indices", "cu_seq_lens_q", "block_mask")


class UnsupportedAttentionError(ValueError):
    """The model asks its attention for something this engine does not do."""


def refuse_unknown(module: Any, attention_mask: Any, keywords: dict[str, Any]) -> None:
    """Raise ``UnsupportedAttentionError`` for a mask made by the model, or a keyword that no attention here knows."""
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} makes an attention mask of its own")
    for name in UNKNOWN:
        if keywords.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} uses {name}")


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend: query [1, H, T, D], key and value [1, Hkv, T, D] → ([1, T, H, Dv], no weights).

    ``s_aux`` are the heads' sinks. If the module has a latent form, key [1, 1, T, R] and value [1, 1, T, P] are what
    the cache keeps of a token. Raises ``UnsupportedAttentionError``."""
    refuse_unknown(module, attention_mask, kwargs)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not causal")
    context = getattr(module, HOLDER).context
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = context.attention
    args = AttentionArgs(scale, sliding_window, softcap, s_aux)
    rotation, context.rotation = context.rotation, None
    if rotation is not None:
        if rotation.q is not query or rotation.k is not key:
            raise UnsupportedAttentionError(f"{type(module).__name__} changes queries or keys after their rotation")
        return plan.attend_rotated(module.layer_idx, rotation, value, args), None
    if getattr(module, latent_attention.FORM, None) is not None:
        if not args.is_plain:
            raise UnsupportedAttentionError(f"{type(module).__name__} caps its scores or has sinks")
        kept = torch.cat((key, value), -1)
        projections = latent_attention.projections_of(module, context.lora)
        return plan.attend_latent(module.layer_idx, query, kept, projections, args), None
    return plan.attend(module.layer_idx, query, key, value, args), None


def install(model: Any, holder: ContextHolder) -> None:
    """Give every module that has a ``layer_idx`` the model's context holder."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            object.__setattr__(module, HOLDER, holder)


AttentionInterface.register(NAME, attend)
