"""Logits of the native step over keys and values stored in any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as tf
from tiny_models import COMMON

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native.library import AMX, library, tiles, use_threads, use_tiles

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64, "max_position_embeddings": 2048}
MODELS = {
    "qwen3": lambda dim=32: tf.Qwen3Config(**WIDE, head_dim=dim),
    "window": lambda: tf.MistralConfig(**WIDE, head_dim=32, sliding_window=37),
    "many heads": lambda: tf.LlamaConfig(**WIDE | {"num_attention_heads": 16, "num_key_value_heads": 1}, head_dim=32),
}


def has_bf16_tiles() -> bool:
    """Return whether the CPU's own tiles multiply bfloat16, without changing which are used."""
    found, used = library(), tiles()
    has = found is not None and use_tiles(AMX) == AMX and bool(found.mlflow_llm_can_attend_bf16(64) & 2)
    use_tiles(used)
    return has


def logits_of(
    loaded: Any, tokens: Any, cuts: list[int], *, beside: int = 0, threads: int = 2, fill: float = 0.0, **kept: Any
) -> Any:
    """Return logits of every token, computed in chunks that end at ``cuts`` beside ``beside`` other sequences, in
    memory that held ``fill`` before."""
    use_threads(threads)
    cache = SlotKVCache(loaded.layers, num_slots=beside + 1, num_tokens=8192, max_model_len=2048, **kept)
    if fill:
        memory = cache.slab.tensor
        (memory if memory.is_floating_point() else memory.view(torch.float32)).fill_(fill)
    decoder = NativeDecoder(loaded.decoder, cache)
    for owner in range(beside + 1):
        cache.acquire(owner, PrefixKey("", ""), tokens.astype(np.int32), at_most=0)
    rows, start = [], 0
    for number, end in enumerate(cuts):
        others = [np.full(3, 7 + i) for i in range(beside)]
        ids = np.concatenate([*others, tokens[start:end]]).astype(np.int64)
        runs = [Row(1 + i, 3 * number, 3) for i in range(beside)] + [Row(0, start, end - start)]
        rows.append(
            decoder.forward(StepInput(ids, runs, [None] * len(runs), range(len(ids) - (end - start), len(ids))))
        )
        start = end
    return torch.cat(rows)
