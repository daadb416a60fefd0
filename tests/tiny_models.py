"""Tiny random models of the supported families: real architectures, weights of a few kilobytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Sampling, ValidRequest
from mlflow_llm.serving.interface.request import Sequence as Prompt

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

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
# multi-head latent attention: every head has its own keys and values, expanded from the latent
LATENT_WIDTHS: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **COMMON,
    **LATENT_WIDTHS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
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
    "mixtral": lambda: tf.MixtralConfig(**COMMON, **EXPERTS),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, head_dim=8, **ROUTED),
    "gpt_oss": lambda: tf.GptOssConfig(**COMMON, head_dim=8, **EXPERTS, **WINDOWS),
    "gemma4": lambda: tf.Gemma4TextConfig(**COMMON, head_dim=8, **WINDOWS),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
    "olmo3": lambda: tf.Olmo3Config(**COMMON, **WINDOWS),
    "cohere2": lambda: tf.Cohere2Config(**COMMON, **WINDOWS),
    "glm4": lambda: tf.Glm4Config(**COMMON, head_dim=8),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0]),
    "granitemoe": lambda: tf.GraniteMoeConfig(**COMMON, **EXPERTS),
    "deepseek_v2": lambda: tf.DeepseekV2Config(**LATENT),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**LATENT),
}

# Run by hand with the others for docs/architectures.md (tests/architectures.py), not with every change.
MORE_FAMILIES: dict[str, Callable[[], Any]] = {
    "apertus": lambda: tf.ApertusConfig(**COMMON),
    "arcee": lambda: tf.ArceeConfig(**COMMON),
    "axk1": lambda: tf.AXK1Config(**LATENT),
    "cohere": lambda: tf.CohereConfig(**COMMON),
    "ernie4_5": lambda: tf.Ernie4_5Config(**COMMON, head_dim=8),
    "exaone4": lambda: tf.Exaone4Config(**COMMON, **WINDOWS, sliding_window_pattern=2),
    "gemma": lambda: tf.GemmaConfig(**COMMON, head_dim=8),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **COMMON, head_dim=8, **WINDOWS, num_kv_shared_layers=0, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0, 0.0],
    ),
    "glm": lambda: tf.GlmConfig(**COMMON, head_dim=8),
    "glm4_moe": lambda: tf.Glm4MoeConfig(
        **COMMON, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteConfig(**LATENT),
    "gpt_bigcode": lambda: tf.GPTBigCodeConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
    "granite": lambda: tf.GraniteConfig(
        **COMMON, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=2.0
    ),
    "granitemoeshared": lambda: tf.GraniteMoeSharedConfig(**COMMON, **EXPERTS, shared_intermediate_size=24),
    "hunyuan_v1_dense": lambda: tf.HunYuanDenseV1Config(**COMMON, head_dim=8),
    "longcat_flash": lambda: tf.LongcatFlashConfig(
        **{name: value for name, value in (COMMON | LATENT_WIDTHS).items() if name not in ("num_hidden_layers",
        "intermediate_size")}, head_dim=8, num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=24,
        n_routed_experts=4, moe_topk=2, zero_expert_num=2,
    ),
    "minicpm3": lambda: tf.MiniCPM3Config(**COMMON | LATENT_WIDTHS),
    "minimax_m2": lambda: tf.MiniMaxM2Config(**COMMON, head_dim=8, **EXPERTS, rotary_dim=8),
    "ministral": lambda: tf.MinistralConfig(**COMMON, head_dim=8, **WINDOWS),
    "ministral3": lambda: tf.Ministral3Config(**COMMON, head_dim=8),
    "nemotron": lambda: tf.NemotronConfig(**COMMON),
    "olmo": lambda: tf.OlmoConfig(**COMMON),
    "olmoe": lambda: tf.OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=256, init_std=0.4, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    ),
    "phi": lambda: tf.PhiConfig(**COMMON),
    "phi4": lambda: tf.Phi3Config(**COMMON, partial_rotary_factor=0.5),
    "phimoe": lambda: tf.PhimoeConfig(**COMMON, **EXPERTS),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**COMMON, **ROUTED, shared_expert_intermediate_size=24),
    "seed_oss": lambda: tf.SeedOssConfig(**COMMON, head_dim=8),
    "starcoder2": lambda: tf.Starcoder2Config(**COMMON),
    "youtu": lambda: tf.YoutuConfig(**COMMON | LATENT_WIDTHS, embedding_initializer_range=0.4),
}  # fmt: skip

# Families that the engine refuses by name at load, because their own code cannot be run correctly within it.
REFUSED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "deepseek_v32": lambda: tf.DeepseekV32Config(**LATENT),
    "falcon": lambda: tf.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "gptj": lambda: tf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **COMMON, **EXPERTS, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_state=8
    ),
    "lfm2": lambda: tf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"]),
    "llama4": lambda: tf.Llama4TextConfig(
        **COMMON, head_dim=8, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1
    ),
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1
    ),
    "mpt": lambda: tf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **COMMON, head_dim=8, **ROUTED, shared_expert_intermediate_size=24, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "stablelm": lambda: tf.StableLmConfig(**COMMON),
}  # fmt: skip


def make_model(config: Any, seed: int = 0) -> Any:
    """Return a model of random weights with eager attention, which gives the reference results."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # it would override what ``greedy`` asks for
    return model.to(torch.float32).eval()


def save_bundle(model: Any, directory: Path, content_hash: str = "tiny") -> Bundle:
    model.save_pretrained(directory)
    return Bundle(
        content_hash=content_hash,
        tasks=("completions",),
        model_dir=str(directory),
        tokenizer_dir="",
        model_hashes=hashes(directory),
    )


def hashes(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, as a manifest has them."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the continuation by ``generate()``, ignoring end-of-text."""
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
    """Return a completions request, greedy by default; ``more`` is for ``Sampling`` and ``ValidRequest``."""
    outer = {"cache_salt": "tests"} | {k: more.pop(k) for k in list(more) if k in ValidRequest.__struct_fields__}
    resumed = tuple(more.pop("resumed", ()))
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0, **more})
    sequences = tuple(
        Prompt(prompt_token_ids=tuple(p), seed=seed + i, resumed_token_ids=resumed) for p in prompts for i in range(n)
    )
    return ValidRequest(
        request_id=request_id, task="completions", model="tiny", sequences=sequences, sampling=sampling, n=n, **outer
    )
