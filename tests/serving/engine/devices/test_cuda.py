"""The engine on CUDA, if there is a device: the same code, tokens and vectors as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import run
from tiny_models import greedy, prompt_of, request_of
from transformers import BertConfig, BertModel

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.async_scheduling import AsyncScheduling
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.fused import rotary as fused_rotary
from mlflow_llm.serving.engine.weights import fp8
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_CUDA = {"device": "cuda", "dtype": "float32", "kv_cache_memory": 1 << 26}


def test_tokens_are_those_of_generate(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Prompts of many lengths in one batch, in chunks, give generate()'s greedy tokens."""
    core = EngineCore(tiny_bundle, EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, **ON_CUDA))
    prompts = [prompt_of(size, size) for size in (3, 20, 40, 9, 31)]
    outcomes = run(core, *(request_of(str(i), prompt) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 12)
    core.check_integrity()
    core.close()


def test_kernels_and_graphs_are_used(tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    """In bfloat16, where heads are of a width that kernels take, decodes go by Triton and by recorded steps, and every
    layer leaves its rotary embeddings to the kernel that writes keys; no kernel's trial refuses it."""
    core = EngineCore(tiny_bundle, EngineSettings(max_num_seqs=6, device="cuda", kv_cache_memory=1 << 26))
    assert core.info.paged is not None
    assert (core.info.paged.attention, core.info.paged.attention_reason) == ("triton", "")
    assert core.info.paged.prefill in ("varlen", "triton"), core.info.paged.prefill_reason
    assert (core.info.paged.cuda_graphs, core.info.paged.cuda_graphs_reason) == ((1, 2, 4, 6), "")
    layers = core.parts.runner.step_forward.plain.model.model.layers
    bound = [layer.self_attn.forward.__globals__[fused_rotary.NAME].func for layer in layers]
    assert bound == [fused_rotary.rotated_later] * len(layers)
    outcomes = run(core, *(request_of(str(i), prompt_of(9 + i, i)) for i in range(5)))
    assert all(len(outcome.tokens[0]) == 12 for outcome in outcomes.values())
    assert not [text for text in caplog.messages if "kernel" in text]
    core.close()


def test_weights_in_fp8(tiny_bundle: Bundle) -> None:
    """On a device with float8 products, both few and many rows are multiplied in fp8 and steps are recorded, after the
    self-test at load."""
    settings = EngineSettings(max_num_seqs=40, device="cuda", kv_cache_memory=1 << 26, quantization="fp8")
    core = EngineCore(tiny_bundle, settings)
    has = torch.cuda.get_device_capability() >= fp8.CAPABILITY
    why = "many rows are multiplied as floats: the device has no products in float8"
    assert core.info.quantization_reason == ("" if has else why)
    assert core.info.paged is not None
    assert core.info.paged.cuda_graphs_reason == ""
    outcomes = run(core, *(request_of(str(i), prompt_of(9 + i, i)) for i in range(40)))
    assert all(len(outcome.tokens[0]) == 12 for outcome in outcomes.values())
    core.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_is_waited_for_between_launch_and_read(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step launched ahead does not synchronise with the device for any kind of sampling; in float32, the texts equal
    those of steps launched one by one."""
    follow, followed = AsyncScheduling.follow, []

    def watched(self: AsyncScheduling, step: Any) -> Any:
        try:
            torch.cuda.set_sync_debug_mode("error")
            launched = follow(self, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        followed.append(launched is not None)
        return launched

    monkeypatch.setattr(AsyncScheduling, "follow", watched)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 20}]
    ways += [{"temperature": 0.9, "typical_p": 0.8}, {"temperature": 0.9, "min_p": 0.1}, {"logprobs": 5}]
    ways += [{"repetition_penalty": 1.2, "frequency_penalty": 0.2}, {"logit_bias": ((7, 3.0), (9, -100.0))}]
    ways += [{"bad_words": ((5,), (7, 8)), "no_repeat_ngram_size": 3}]
    ways += [
        {"min_tokens": 20, "stop_token_ids": (3, 4, 5)},
        {"temperature": 0.7, "presence_penalty": 1.0, "logprobs": 0},
    ]
    requests = [request_of(str(i), prompt_of(9 + i, i), seed=i, max_tokens=40 + i, **way) for i, way in enumerate(ways)]
    texts = []
    for setting in ("auto", "none"):
        settings = EngineSettings(max_num_seqs=len(ways), async_scheduling=setting, **ON_CUDA)
        core = EngineCore(tiny_bundle, settings)
        assert core.info.paged is not None
        assert core.info.paged.async_scheduling == (setting == "auto"), core.info.paged.async_scheduling_reason
        texts.append({name: outcome.tokens[0] for name, outcome in run(core, *requests).items()})
        core.check_integrity()
        core.close()
    assert texts[0] == texts[1]
    assert sum(followed) > 30


def test_vectors_equal_those_of_the_cpu(tmp_path: Any) -> None:
    """An encoder gives the same vectors on the device as on the CPU."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    BertModel(config).save_pretrained(tmp_path)
    bundle = Bundle(
        content_hash="tiny", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="", embedding=EmbeddingSpec()
    )
    texts = [(5, 6, 7), (9,), tuple(range(3, 33)), (4, 4, 5)]
    found = [load_embedder(bundle, EngineSettings(device=d, dtype="float32")).embed(texts) for d in ("cuda", "cpu")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
