"""Tiny random models of the families the engine serves: real architectures, weights of a few kilobytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.request import Sampling, ValidRequest
from mlflow_llm.serving.request import Sequence as Prompt

VOCAB = 131
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Weights this large make the next token depend on the context, not on the last token alone.
    "initializer_range": 0.4,
}


def _gemma(cls: Any, **more: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return cls(**COMMON, head_dim=8, sliding_window=7, layer_types=kinds, query_pre_attn_scalar=8, **more)


def _gpt2() -> Any:
    return tf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.4, resid_pdrop=0.0,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    # heads of 16, which the native step takes
    "llama_wide": lambda: tf.LlamaConfig(**COMMON | {"hidden_size": 64}),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=8),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=7),
    "gemma2": lambda: _gemma(tf.Gemma2Config, attn_logit_softcapping=5.0, final_logit_softcapping=20.0),
    "gemma3": lambda: _gemma(tf.Gemma3TextConfig),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "gpt2": _gpt2,
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}

SILENTLY_WRONG: dict[str, Callable[[], Any]] = {
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: tf.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
}


def make_model(config: Any, seed: int = 0) -> Any:
    """A model of random weights; reference results are those of its eager attention."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # it would win over what ``greedy`` asks for
    return model.to(torch.float32).eval()


def save_bundle(model: Any, directory: Path, content_hash: str = "tiny") -> Bundle:
    model.save_pretrained(directory)
    return Bundle(content_hash=content_hash, tasks=("completions",), model_dir=str(directory), tokenizer_dir="")


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What ``generate()`` continues with, end-of-text not heeded."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=tf.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        ),
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


def request_of(request_id: str, *prompts: Sequence[int], seed: int = 0, n: int = 1, **more: Any) -> ValidRequest:
    """A completions request, greedy unless told otherwise; ``more`` is for ``Sampling`` and ``ValidRequest``."""
    outer = {"cache_salt": "tests"} | {k: more.pop(k) for k in list(more) if k in ValidRequest.__struct_fields__}
    resumed = tuple(more.pop("resumed", ()))
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0, **more})
    sequences = tuple(
        Prompt(prompt_token_ids=tuple(p), seed=seed + i, resumed_token_ids=resumed) for p in prompts for i in range(n)
    )
    return ValidRequest(
        request_id=request_id, task="completions", model="tiny", sequences=sequences, sampling=sampling, n=n, **outer
    )
