"""The engine on real weights."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_tokens import greedy, tokens_reported
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n")


def test_greedy_equals_generate(smollm2_dir: str | Path) -> None:
    """Three prompts in one batch, chunked, give generate()'s greedy tokens of each alone."""
    where = str(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(where)
    prompts = [tuple(tokenizer(p).input_ids) for p in PROMPTS]
    core = EngineCore(
        Bundle(content_hash="smollm2", tasks=("completions",), model_dir=where, tokenizer_dir=where),
        EngineSettings(kv_cache_memory=1 << 28, max_num_batched_tokens=8, max_num_seqs=4),
    )
    found = tokens_reported(core, *(greedy(str(i), ids, 24) for i, ids in enumerate(prompts)))
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for i, ids in enumerate(prompts):
        config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        row = torch.tensor([ids])
        out = model.generate(row, attention_mask=torch.ones_like(row), generation_config=config)
        assert found[str(i)] == out[0, len(ids) :].tolist()
