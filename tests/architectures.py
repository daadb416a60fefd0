"""Generator of docs/architectures.md, by running a tiny random model of every architecture in the engine:

python tests/architectures.py > docs/architectures.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "serving"), str(TESTS / "serving/engine")]

import transformers  # noqa: E402
from engine_runs import run  # noqa: E402
from tiny_models import (  # noqa: E402
    COMMON,
    EXPERTS,
    FAMILIES,
    MORE_FAMILIES,
    REFUSED,
    ROUTED,
    WINDOWS,
    greedy,
    make_model,
    prompt_of,
    request_of,
    save_bundle,
)

from mlflow_llm.serving.engine.core import EngineCore  # noqa: E402
from mlflow_llm.serving.interface.errors import PackagingError  # noqa: E402
from mlflow_llm.serving.interface.settings import EngineSettings  # noqa: E402

LENGTHS = (1, 3, 40, 9, 23, 17)  # longer than the sliding window, longer than a chunk
# heads of a width that the native kernels take, for the architectures they support
WIDE = COMMON | {"hidden_size": 64}
WIDE_ROUTED = ROUTED | {"moe_intermediate_size": 32}


def wide_gemma(cls: Any, **more: Any) -> Any:
    return cls(**WIDE, **WINDOWS, head_dim=16, query_pre_attn_scalar=8, **more)


NATIVE: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**WIDE),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**WIDE, head_dim=16),
    "gemma2": lambda: wide_gemma(transformers.Gemma2Config, attn_logit_softcapping=5.0, final_logit_softcapping=20.0),
    "gemma3": lambda: wide_gemma(transformers.Gemma3TextConfig),
    "granite": lambda: transformers.GraniteConfig(
        **WIDE, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=2.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=COMMON["vocab_size"], n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1,
        eos_token_id=2, initializer_range=0.4, resid_pdrop=0.0,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**WIDE, **EXPERTS),
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(**WIDE, **EXPERTS, shared_intermediate_size=32),
    "ministral": lambda: transformers.MinistralConfig(**WIDE, head_dim=16, **WINDOWS),
    "mixtral": lambda: transformers.MixtralConfig(**WIDE, **EXPERTS),
    "olmoe": lambda: transformers.OlmoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: transformers.PhimoeConfig(**WIDE, **EXPERTS),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**WIDE, **WIDE_ROUTED, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDE, **WIDE_ROUTED, head_dim=16),
    "seed_oss": lambda: transformers.SeedOssConfig(**WIDE, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**WIDE),
    "olmo2": lambda: transformers.Olmo2Config(**WIDE),
    "olmo3": lambda: transformers.Olmo3Config(**WIDE, **WINDOWS),
    "phi3": lambda: transformers.Phi3Config(**WIDE),
    "phi4": lambda: transformers.Phi3Config(**WIDE, partial_rotary_factor=0.5),
    "smollm3": lambda: transformers.SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
}  # fmt: skip
NAMES = {
    "axk1": "A.X K1 (latent attention, experts)",
    "deepseek_v2": "DeepSeek V2 (latent attention, experts)",
    "deepseek_v3": "DeepSeek V3, R1 (latent attention, experts)",
    "deepseek_v32": "DeepSeek V3.2",
    "gemma4": "Gemma 4, text",
    "gemma3": "Gemma 3, text",
    "gemma3n": "Gemma 3n, text",
    "glm4_moe_lite": "GLM-4 MoE lite (latent attention, experts)",
    "gpt_oss": "gpt-oss (sinks, experts)",
    "granitemoehybrid": "Granite 4 hybrids",
    "llama4": "Llama 4, text",
    "llama_wide": "Llama, heads of 16",
    "phi3": "Phi-3",
    "phi4": "Phi-4 (rotation of a part)",
    "longcat_flash": "LongCat Flash (latent attention, experts)",
    "minicpm3": "MiniCPM3 (latent attention)",
    "mpt": "MPT",
    "youtu": "Youtu (latent attention)",
}
HEAD = """\
# Architectures

Model code is transformers', whatever the architecture; ours is what it calls for attention, and the loop around it.
Every architecture below was run as a tiny random model, six prompts of 1 to 40 tokens in one mixed batch with chunked
prefill, greedy, in float32, and compared token for token with what `generate()` gives for each prompt alone. The page
is made by running that: `python tests/architectures.py > docs/architectures.md`; the tests run those marked "tests"
with every change, and compare the list with the cases that there are.

Others are tried when an engine loads them: the logits of the model's own attention are compared with ours
(`engine/models/verification.py`), and what differs, or cannot be replaced, is refused by its name. What their class
shows is refused when they are logged, and so are encoders and cross-encoders that differ; of those with more than 700
million parameters, the first layers are tried, with a part of the vocabulary if need be.

"native": a whole step runs in our kernels, where the processor has what they need ([performance](performance.md));
elsewhere, and for the others, the model's own code runs in torch. `/health` says which.
"""
NOTES = """
- **Sinks** (gpt-oss) take their part of the softmax and give no value; they go through torch's plain operations, as
  soft-capped scores do, not through its fused attention.
- **Multi-head latent attention** (DeepSeek V2 and V3, A.X K1, GLM-4 MoE lite, LongCat Flash, MiniCPM3, Youtu): of a
  token the KV cache keeps the latent and the rotated key that all heads share, `kv_lora_rank + qk_rope_head_dim`
  numbers a layer, instead of the keys and values of every head: with DeepSeek V2's and V3's widths 71 times less.
  `kv_b_proj` is multiplied into queries and sums (absorbed), or makes keys and values of a long run of a prompt while
  it is computed, whichever takes fewer products for a run of its length at its place; with `batch_invariant` those are
  the same in any batch. It stays in floats under `quantization: int8`, since its parts are used in other orders;
  adapters may be on it and on every other projection. A model with latent attention in another form runs by its own
  code with whole keys and values, and the log and `/health` (`kv_cache_reason`) say why. DeepSeek V3.2's choice of
  tokens by an index (`indexed_attention`) is refused.
- **Experts** (Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE, GraniteMoE, Phi-MoE) run natively in float32, int8 and
  bfloat16: the router in float32, tokens grouped by expert, so that an expert's weights are read once a step, and a
  token's sum in the order of its own scores, whatever is beside it. Layers with and without experts may alternate. A
  shared expert takes adapters, experts take none (`target_parameters`, and `experts.0.…` of older adapters, are refused
  by name). `quantization: int8` makes int8 of their experts by torch on CPU too, and `quantize="int8"` does when they
  are logged; experts of other architectures stay floats. Not native, by torch: routers that choose by sigmoids, groups
  or biases of experts (GLM-4 MoE, MiniMax, DeepSeek), experts with biases or sinks (gpt-oss), latent attention.
- **ALiBi** (Bloom, MPT, Falcon's first ones), recurrent layers, convolutions and attention in chunks are refused by
  name: transformers offers no way to replace the first, and the others keep a state that is no KV cache.
- **Rotations that depend on the longest sequence of a batch** (`dynamic`, `longrope`) bound the context to what they
  were trained for.

## Encoders

For embeddings and [cross-encoders](scoring.md). Native, in float32 and int8: BERT, RoBERTa, XLM-RoBERTa, CamemBERT,
DistilBERT, ELECTRA (with words as wide as its layers), MPNet, ModernBERT; so the models made of them: e5, bge,
all-MiniLM, all-mpnet and others. Others run by their own code in torch, texts side by side without padding, with
windows to both sides too; MPNet there takes texts of equal length at a time, since its attention cannot be replaced
(scores have a bias for distance). What neither can do is refused by name (DeBERTa). Decoders as embedders run in torch.

A sentence-transformers directory has the library's own vectors: its poolings (also several, joined), `Dense`,
`LayerNorm`, `Normalize` and `Dropout` after pooling, `truncate_dim`, prompts and `default_prompt_name`, and its length
limit, which is `max_seq_length` up to 5.x and the tokenizer's `model_max_length` from 6.0 on. Any other module, code of
the model's own, token vectors that pass a module, `include_prompt=False`, texts written by a chat template
(`modality_config` with `message`), another `transformer_task` and `query_length` are refused by name. A model without
its files is taken as the library takes it: the mean of the token vectors (of a `…ForCausalLM` the last one), not scaled
to length 1. `embedding={"normalize": True, "truncate_dim": 256}` changes pooling, length and limits.

Without `task` a sentence-transformers directory and an encoder without a head are embedding models, and so is an
encoder as it was trained (`…ForMaskedLM`, `…ForPreTraining`), as sentence-transformers takes it; a warning says so.
Of other heads only a [cross-encoder](scoring.md)'s is used: a classifier of several labels, or of tokens, is refused by
name, unless `task="embeddings"` says that its encoder is wanted without the head.

## Checkpoints that are quantised already

Four bits in AWQ (version `gemm`), GPTQ and compressed-tensors (`pack-quantized`), and float8 in compressed-tensors
(`float-quantized`), of models that generate, are logged as they are and [computed with as they
are](gpu.md#weights-that-others-quantised). Other variants of these are refused by the entry of `quantization_config`
that says so, and bitsandbytes, FP8, MXFP4 and every other form that transformers knows by its name: log the checkpoint
that they were made of, or a model object after transformers' `dequantize()`; the engine quantises floats itself
(`quantization: int8`, or once with [`quantize="int8"`](quantize.md)). A GGUF file runs: its weights are made floats
when it is logged, and are not kept quantised.

[vLLM](vllm.md) runs the others: a model that is logged with `engine="vllm"` is stored as it is.

## GGUF files

The architectures `gemma2`, `gemma3`, `gpt2`, `llama`, `nemotron`, `phi3`, `qwen2`, `qwen2moe`, `qwen3`, `qwen3moe`,
`stablelm` and `starcoder2` (`general.architecture`) are read; other files are refused by it. Every key that describes
the model or its tokenizer is honoured, or has a value that changes nothing, or refuses the file by its name: scaling of
rotary embeddings (`rope.scaling.*` of type linear, YaRN and longrope, `rope_freqs.weight`, `rope_factors_*.weight`),
base frequencies, windows, soft caps, experts, biases, `tokenizer.ggml.pre`, `add_bos_token`, chat templates by name.
So do tensors that the model has no place for, and parts of a split file (`split.count`; join them with
`llama-gguf-split --merge`). A text ends at the tokens that `eos_token_id`, `eot_token_id` and `eom_token_id` name, and
at those that llama.cpp knows by their text (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>` …). `general.sampling.*`
become the model's sampling defaults. Models of experts in the architecture `llama` (Mixtral) are refused by
`llama.expert_count`.
"""


def tried(make: Callable[[], Any]) -> tuple[str, str, str]:
    """Return (class, "equal", kernels), or the error in place of the second."""
    model = make_model(make())
    name = type(model).__name__
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory=1 << 24)
    with tempfile.TemporaryDirectory() as folder:
        try:
            core = EngineCore(save_bundle(model, Path(folder)), settings)
        except PackagingError as error:
            return name, f"refused: {str(error).removeprefix(name).removeprefix(' is not supported: ')}", ""
        prompts = [prompt_of(n, seed) for seed, n in enumerate(LENGTHS)]
        outcomes = run(core, *(request_of(str(i), prompt) for i, prompt in enumerate(prompts)))
        equal = all(outcomes[str(i)].tokens[0] == greedy(model, prompt, 12) for i, prompt in enumerate(prompts))
        kernels = core.info.kernels
        core.close()
    return name, "equal" if equal else "WRONG", kernels


def row(family: str, make: Callable[[], Any]) -> str:
    name, outcome, kernels = tried(make)
    if family in NATIVE:
        _, other, kernels = tried(NATIVE[family])
        outcome = outcome if outcome == other else "WRONG"
    native = {"native": "native", "torch": "torch"}.get(kernels, "")
    when = "tests" if family in FAMILIES or family in REFUSED else "by hand"
    title = NAMES.get(family) or name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return f"| `{family}` | {title} | `{name}` | {outcome} | {native} | {when} |"


def page() -> str:
    transformers.logging.set_verbosity_error()
    families = FAMILIES | MORE_FAMILIES | REFUSED
    rows = "\n".join(row(family, families[family]) for family in sorted(families))
    versions = f"With transformers {transformers.__version__}:"
    table = "| `model_type` | model | class | tokens | kernels | run |\n|---|---|---|---|---|---|\n"
    return f"{HEAD}\n{versions}\n\n{table}{rows}\n{NOTES}"


if __name__ == "__main__":
    print(page(), end="")
