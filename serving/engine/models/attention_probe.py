"""A probe of what a decoder asks of its attention, on torch's meta device: no weights are read, nothing is computed."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface

from ...interface.errors import PackagingError, reason
from ..attention.attention import UnsupportedAttentionError, refuse_unknown

logger = logging.getLogger(__name__)

NAME = "mlflow_llm_probe"
PROBE_TOKENS = 4


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Return attention's shape [1, T, H, Dv]. Raises ``UnsupportedAttentionError`` for what no attention here does."""
    refuse_unknown(module, attention_mask, kwargs)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not causal")
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@torch.inference_mode()
def refuse_attention(skeleton: Any) -> None:
    """Raise ``PackagingError`` if the decoder ``skeleton``, on the meta device, asks for attention that no engine has.

    A model whose code cannot run without numbers is left to the engine, which tries it with them.
    """
    before = skeleton.config._attn_implementation
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        skeleton.set_attn_implementation(NAME)
        skeleton(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
    except UnsupportedAttentionError as error:
        raise PackagingError(
            f"model: {type(skeleton).__name__} is not supported: the engine cannot run its attention: {error}"
        ) from None
    except Exception as error:  # of the model's code, which may look at numbers
        logger.debug("the attention was not tried: %s", reason(error))
    finally:
        skeleton.set_attn_implementation(before)


AttentionInterface.register(NAME, attend)
