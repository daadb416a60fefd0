"""Decoder variants that the native step runs beside Llama's: each equals transformers' own code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import run
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_models import COMMON, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.adapters.virtual_tokens import VirtualTokens
from mlflow_llm.serving.engine.assembly import EngineParts, assemble
from mlflow_llm.serving.engine.attention.kv_cache import Row
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = [
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.skipif(library.library() is None, reason="the native kernels are not here"),
]

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64, "max_position_embeddings": 700}
WINDOWS: dict[str, Any] = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
# Softmaxes of few near-equal scores: what is capped, and far from one token's.
GEMMA: dict[str, Any] = WIDE | WINDOWS | {"head_dim": 32, "query_pre_attn_scalar": 24, "initializer_range": 0.2}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 350, "partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3}
GRANITE: dict[str, Any] = {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 2.0}
FORMS = {
    "gemma": lambda: tf.GemmaConfig(**WIDE, head_dim=32),
    "gemma2": lambda: tf.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=20.0),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=700, bos_token_id=1, eos_token_id=2,
        initializer_range=0.4, resid_pdrop=0.0,
    ),
    "granite": lambda: tf.GraniteConfig(
        **WIDE, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=2.0
    ),
    "granitemoe": lambda: tf.GraniteMoeConfig(**WIDE, **LOCAL_EXPERTS, **GRANITE, attention_multiplier=0.3),
    "granitemoe_shared": lambda: tf.GraniteMoeSharedConfig(
        **WIDE, **LOCAL_EXPERTS, **GRANITE, attention_multiplier=0.3, shared_intermediate_size=32
    ),
    "mixtral": lambda: tf.MixtralConfig(**WIDE, **LOCAL_EXPERTS, sliding_window=37),
    "olmo2": lambda: tf.Olmo2Config(**WIDE),
    "olmo3": lambda: tf.Olmo3Config(**WIDE, **WINDOWS),
    "olmoe": lambda: tf.OlmoeConfig(**WIDE, num_experts=6, num_experts_per_tok=3),
    "phi3": lambda: tf.Phi3Config(**WIDE, sliding_window=37),
    "phi4": lambda: tf.Phi3Config(**WIDE, partial_rotary_factor=0.5),
    "phi4_mini": lambda: tf.Phi3Config(**WIDE, rope_parameters=LONG_ROPE),
    "qwen2_windows": lambda: tf.Qwen2Config(**WIDE, **WINDOWS, use_sliding_window=True),
    "phimoe": lambda: tf.PhimoeConfig(
        **WIDE, num_local_experts=6, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True
    ),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**WIDE, **EXPERTS, shared_expert_intermediate_size=80),
    # one layer in two has experts; a dense one is wider than all that is chosen
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **WIDE | {"num_hidden_layers": 3, "intermediate_size": 96}, **EXPERTS, head_dim=32, norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "qwen3_moe_some": lambda: tf.Qwen3MoeConfig(
        **WIDE, **EXPERTS, head_dim=32, norm_topk_prob=False, mlp_only_layers=[0]
    ),
    "starcoder2": lambda: tf.Starcoder2Config(**WIDE, sliding_window=37),
    "smollm3": lambda: tf.SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
}  # fmt: skip
ADAPTERS = ("plain", "dora")
LENGTHS = (1, 7, 64, 330)
ROUTED = ("moe", "mixtral")  # a rounding difference may choose another expert


def is_routed(name: str) -> bool:
    return any(part in name for part in ROUTED)


def settings_of(**more: Any) -> EngineSettings:
    return EngineSettings(**{"kv_cache_memory": 1 << 24, "max_num_seqs": 16} | more)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_generates_what_generate_does(name: str, tmp_path: Path) -> None:
    """Chunked prompts beside decodes, then with cached prefixes and predicted tokens, give the tokens of transformers'
    greedy ``generate``."""
    model = make_model(FORMS[name]())
    core = EngineCore(save_bundle(model, tmp_path), settings_of(max_num_batched_tokens=100))
    assert core.info.kernels == "native"
    prompts = {str(n): prompt_of(n, n) for n in LENGTHS} | {"again": prompt_of(5, 1) * 9}
    wanted = {name: greedy(model, prompt, 9) for name, prompt in prompts.items()}
    for _ in range(2):
        found = run(core, *(request_of(name, prompt, max_tokens=9) for name, prompt in prompts.items()))
        assert {name: found[name].tokens[0] for name in prompts} == wanted
    core.close()


def logits(
    parts: EngineParts, tokens: Any, cuts: Sequence[int], names: Sequence[str | None] = (None,), vectors: Any = None
) -> torch.Tensor:
    """Return logits of every token of the first of ``names``' sequences, in chunks that end at ``cuts``, beside the
    others."""
    for owner in range(len(names)):
        parts.cache.acquire(owner, "", tokens.astype(np.int32), at_most=0)
    found, start = [], 0
    for end in cuts:
        rows = [Row(owner, start, end - start) for owner in parts.cache.decode_order(range(len(names)))]
        ids = np.concatenate([tokens[start:end]] * len(rows))
        virtual = None if vectors is None else VirtualTokens(np.arange(0, len(ids), end - start), vectors)
        adapters = [names[row.owner] for row in rows]
        with torch.inference_mode():
            every = parts.runner.step_forward.forward(StepInput(ids, rows, adapters, range(len(ids)), virtual))
        at = next(i for i, row in enumerate(rows) if row.owner == 0)
        found.append(every[at * (end - start) : (at + 1) * (end - start)].clone())
        start = end
    for owner in range(len(names)):
        parts.cache.release(owner, keep=False)
    return torch.cat(found)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median relative distance of the rows."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


# In int8 beside float32: rotating gains nothing for weights at random, and this one is 0.107 away.
FURTHEST = {"granite": 0.12}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_token_is_bitwise_the_same_however_it_was_computed(name: str, tmp_path: Path) -> None:
    """Chunks, neighbours and threads change no bit, in float32, int8 and bfloat16; the logits are those of torch's
    kernels in float32 and int8, and close to those of float32."""
    bundle = save_bundle(make_model(FORMS[name]()), tmp_path)
    tokens = np.random.default_rng(0).integers(0, 131, 90)
    threads = library.num_native_threads()
    exact = logits(assemble(bundle, settings_of(kernels="torch")), tokens, [90])
    for more, tolerance in (({}, 1e-4), ({"quantization": "int8"}, 0.06), ({"dtype": "bfloat16"}, 0.05)):
        if more.get("dtype") and not library.has_bf16():
            continue
        parts = assemble(bundle, settings_of(**more))
        assert isinstance(parts.runner.step_forward, NativeDecoder)
        wanted = exact
        if "dtype" not in more:
            wanted = logits(assemble(bundle, settings_of(kernels="torch", **more)), tokens, [90])
        try:
            library.use_threads(2)
            whole = logits(parts, tokens, [90])
            assert distance(whole, wanted) < (2 * tolerance if more and is_routed(name) else tolerance)
            assert distance(whole, exact) < FURTHEST.get(name, 0.2 if is_routed(name) else 0.1)
            for count, cuts, beside in ((1, [5, 33, 64, 89, 90], 2), (3, [1, 2, 88, 89, 90], 0)):
                library.use_threads(count)
                assert torch.equal(logits(parts, tokens, cuts, [None] * (beside + 1)), whole)
        finally:
            library.use_threads(threads)


def save_adapter(model: Any, folder: Path, *, dora: bool) -> None:
    """Save an adapter on every linear but the head as peft did before transformers 5, whose peft takes experts for
    linears."""
    tensors = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            sides = {"lora_A.weight": (5, module.in_features), "lora_B.weight": (module.out_features, 5)}
            sides |= {"lora_magnitude_vector": (module.out_features,)} if dora else {}
            tensors |= {f"base_model.model.{name}.{side}": 0.3 * torch.randn(*shape) for side, shape in sides.items()}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 5, "lora_alpha": 5, "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_adapters_and_vectors_are_added_as_with_torch(name: str, tmp_path: Path) -> None:
    """Adapters on every linear, also with magnitudes, and vectors in place of tokens equal torch's."""
    bundle = save_bundle(make_model(FORMS[name]()), tmp_path / "model")
    for adapter in ADAPTERS:
        torch.manual_seed(1)
        if is_routed(name):
            save_adapter(make_model(FORMS[name]()), tmp_path / adapter, dora=adapter == "dora")
            continue
        kinds = {"init_lora_weights": False, "target_modules": "all-linear", "use_dora": adapter == "dora"}
        config = LoraConfig(r=5, fan_in_fan_out=name == "gpt2", **kinds)
        get_peft_model(make_model(FORMS[name]()), config).save_pretrained(tmp_path / adapter)
    tokens = np.random.default_rng(2).integers(0, 131, 12)
    vector = np.random.default_rng(3).normal(size=(1, 64)).astype(np.float32)
    native, other = (assemble(bundle, settings_of(kernels=kernels)) for kernels in ("auto", "torch"))
    for parts in (native, other):
        for adapter in ADAPTERS:
            parts.lora.add(adapter, parts.lora.read(adapter, str(tmp_path / adapter)))
    base = logits(native, tokens, [12])
    for adapter in ADAPTERS:
        found = logits(native, tokens, [12], [adapter])
        assert distance(found, logits(other, tokens, [12], [adapter])) < 1e-4
        assert distance(found, base) > 0.01
        assert torch.equal(logits(native, tokens, [4, 11, 12], [adapter, "plain", None, adapter]), found)
    placed = logits(native, tokens, [12], vectors=vector)
    assert distance(placed, logits(other, tokens, [12], vectors=vector)) < 1e-4
    assert distance(placed, base) > 0.01
