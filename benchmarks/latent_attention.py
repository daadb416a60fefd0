"""Gain of caching the latent of multi-head latent attention, beside whole keys and values of every head.

    python benchmarks/latent_attention.py [--context 2000] [--sequences 8] [--heads 16] [--layers 4]

A random model with DeepSeek V2 Lite's attention (kv_lora_rank 512, rope 64, nope 128, values 128), without experts,
twice in one process: as it is loaded, and with its own code's keys and values. Bytes are those of a token in all
layers, times medians of steps and of prompts that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any
from unittest.mock import patch

import torch
import transformers
from bfloat16 import drawn, seconds_a_step, seconds_to_first
from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.attention import latent_attention
from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

VOCAB = 20480
MEMORY = 4 << 30  # of keys and values


def save_model(folder: str, asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=asked.layers,
        first_k_dense_replace=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=asked.context + 128,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def load(folder: str, *, whole: bool) -> GenerationCore:
    bundle = Bundle(content_hash="latent", tasks=("completions",), model_dir=folder, tokenizer_dir="")
    settings = EngineSettings(kv_cache_memory=MEMORY, prefix_caching=False)
    if not whole:
        return announced(GenerationCore(bundle, settings))
    with patch.object(latent_attention, "install", lambda model: ([], "asked for by the benchmark")):
        return announced(GenerationCore(bundle, settings))


def measured(cores: dict[str, GenerationCore], asked: argparse.Namespace) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, core in cores.items():
        tokens = core.parts.cache.num_tokens_total
        rows[name] = {"kept": name, "bytes a token": MEMORY // tokens, "tokens in 4 GiB": tokens}
    prompts: dict[str, list[float]] = {name: [] for name in cores}
    steps: dict[str, list[float]] = {name: [] for name in cores}
    for seed in range(asked.rounds):
        for name, core in cores.items():
            prompts[name].append(seconds_to_first(core, drawn(asked.context, seed)))
            steps[name].append(seconds_a_step(core, asked.sequences, asked.context))
    for name, row in rows.items():
        row[f"prompt of {asked.context}, ms"] = 1e3 * statistics.median(prompts[name])
        row[f"step of {asked.sequences}, ms"] = 1e3 * statistics.median(steps[name])
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("context", 2000), ("sequences", 8), ("heads", 16), ("layers", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=number)
    asked = parser.parse_args()
    say_kernels()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, asked)
        cores = {"the latent": load(folder, whole=False), "whole keys and values": load(folder, whole=True)}
        publish("latent_attention", measured(cores, asked), layers=asked.layers, heads=asked.heads)
        for core in cores.values():
            core.close()


if __name__ == "__main__":
    main()
