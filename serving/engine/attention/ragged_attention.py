"""Attention of whole sequences side by side in one flat row, without padding and without a cache.

::

    row      a a a | b b b | c c c c c      sorted by length
    calls    [2, H, 3, D]    [1, H, 5, D]   sequences of equal length share a call; no mask, no padding

Attention is bidirectional or causal, as the module says. Options that are not known are refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from .attention import HOLDER, UnsupportedAttentionError, refuse_unknown
from .kv_cache import AttentionArgs

NAME = "mlflow_llm_ragged"


class RaggedPlan:
    """The layout of a row: ``lengths`` of its sequences in order. Equal lengths should be neighbours."""

    __slots__ = ("runs",)

    def __init__(self, lengths: Sequence[int]) -> None:
        self.runs: list[tuple[int, int, int]] = []  # (first token, sequences, length)
        start = 0
        for length, group in groupby(lengths):
            count = len(list(group))
            self.runs.append((start, count, length))
            start += count * length

    def attend(self, query: Any, key: Any, value: Any, args: AttentionArgs, causal: bool) -> Any:
        """Attend: query [H, T, D] over key and value [Hkv, T, D] -> [T, H, Dv]."""
        heads, tokens, _ = query.shape
        window = args.window
        out = query.new_empty(tokens, heads, value.shape[-1])
        for start, count, length in self.runs:
            end = start + count * length
            q, k, v = (t[:, start:end].unflatten(1, (count, length)).transpose(0, 1) for t in (query, key, value))
            mask = _window_mask(length, window, q, causal) if window is not None and length > window else None
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=args.scaling,
                enable_gqa=heads != k.shape[1],
            )
            out[start:end].unflatten(0, (count, length)).copy_(y.transpose(1, 2))
        return out


def _window_mask(length: int, window: int, like: Any, causal: bool) -> Any:
    """Return the mask [L, L] of the tokens nearer than ``window``; if causal, only the token itself and those before
    it."""
    at = torch.arange(length, device=like.device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window


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
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend as transformers calls it: query [1, H, T, D], key and value [1, Hkv, T, D] -> ([1, T, H, Dv], None).

    Raises ``UnsupportedAttentionError`` for options that are not known.
    """
    name = type(module).__name__
    refuse_unknown(module, attention_mask, kwargs)
    if softcap is not None:
        raise UnsupportedAttentionError(f"{name} uses softcap")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    plan = getattr(module, HOLDER).context.attention
    args = AttentionArgs(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window)
    return plan.attend(query[0], key[0], value[0], args, causal)[None], None


AttentionInterface.register(NAME, attend)
