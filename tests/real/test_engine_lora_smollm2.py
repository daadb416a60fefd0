"""Adapters through the engine on real weights, beside peft."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_tokens import greedy, tokens_reported
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

PROMPT = "The old lighthouse keeper opened the door and"
CONFIGS = {"wide": (16, 8, "all-linear"), "narrow": (4, 64, ["q_proj", "v_proj"])}  # rank, alpha, modules
NUM_TOKENS = 8


def test_two_adapters_and_base_in_one_batch_equal_peft(smollm2_dir: Path, tmp_path: Path) -> None:
    """One prompt asked of base and two random adapters at once gives what peft's generate() gives of each."""
    where = str(smollm2_dir)
    ids = tuple(AutoTokenizer.from_pretrained(where)(PROMPT).input_ids)
    base = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    base.generation_config.eos_token_id = None
    model = None
    for seed, (name, (rank, alpha, modules)) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, init_lora_weights=False)
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    assert model is not None
    model.save_pretrained(tmp_path)

    def generate() -> list[int]:
        config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        row = torch.tensor([ids])
        out = model.generate(input_ids=row, attention_mask=torch.ones_like(row), generation_config=config)
        return list(out[0, len(ids) :].tolist())

    model.eval()
    expected: dict[str | None, list[int]] = {}
    for name in CONFIGS:
        model.set_adapter(name)
        expected[name] = generate()
    with model.disable_adapter():
        expected[None] = generate()
    bundle = Bundle(
        content_hash="smollm2",
        tasks=("completions",),
        model_dir=where,
        tokenizer_dir=where,
        adapters={name: str(tmp_path / name) for name in CONFIGS},
    )
    core = EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 28, max_num_batched_tokens=8, max_num_seqs=4))
    found = tokens_reported(core, *(greedy(str(name), ids, NUM_TOKENS, adapter=name) for name in expected))
    assert found == {str(name): tokens for name, tokens in expected.items()}
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
