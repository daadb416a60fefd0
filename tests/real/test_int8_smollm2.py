"""int8 linears, and keys and values in int8, on SmolLM2-135M."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import INT8_LAYOUT, SlotKVCache
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native.library import library
from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_perplexity_of_int8_is_near_float32(smollm2_dir, kernels):
    """int8 linears change the perplexity of 800 tokens by more than nothing and less than a hundredth."""
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(TEXT, return_tensors="pt").input_ids[:, :800]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def perplexity():
        return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).exp().item()

    exact = perplexity()
    linear.install(model, ContextHolder(), EngineSettings(quantization="int8", kernels=kernels))
    ratio = perplexity() / exact
    assert 0.99 < ratio < 1.01
    assert ratio != 1


@pytest.mark.skipif(library() is None, reason="no compiler, or a processor without kernels of ours")
def test_perplexity_of_int8_keys_and_values_is_float32s(smollm2_dir):
    """int8 keys and values beside float32 weights change the perplexity by more than nothing and less than a
    hundredth."""
    bundle = Bundle(content_hash="real", tasks=("completions",), model_dir=str(smollm2_dir), tokenizer_dir="")
    loaded = load_model(bundle, EngineSettings(kv_cache_dtype="int8", max_model_len=1024))
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(TEXT, return_tensors="np").input_ids[0, :800]

    def perplexity(kept):
        cache = SlotKVCache(loaded.layers, num_slots=1, num_tokens=1024, max_model_len=1024, **kept)
        cache.acquire(0, PrefixKey("", ""), ids.astype(np.int32))
        logits = NativeDecoder(loaded.decoder, cache).forward(
            StepInput(ids, [Row(0, 0, len(ids))], [None], range(len(ids)))
        )
        return torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(ids[1:])).exp().item()

    ratio = perplexity(INT8_LAYOUT) / perplexity({"dtype": torch.float32})
    assert 0.99 < ratio < 1.01
    assert ratio != 1
