"""Each kind of adapter in docs/adapters.md continues as peft's own model does, or is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run
from lora_tensors import task_of
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.adapters.files import check_fits, read_adapter
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.interface.request import PromptTable
from mlflow_llm.serving.interface.settings import EngineSettings

# peft 0.21 reads a property that transformers 5.23 deprecates, and warns where a linear has no bias
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
]
MAX_TOKENS = 8
EVERY = {"llama_wide": "all-linear", "qwen2": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"]}
SOME = {"llama_wide": ["o_proj", "down_proj", "up_proj"], "qwen2": ["q_proj", "v_proj"], "gpt2": ["c_fc"]}
FIRST = {"llama_wide": "o_proj", "qwen2": "v_proj", "gpt2": "c_fc"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"lora_alpha": 16},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "lora_alpha": 16},
    "dora_rslora": {"use_dora": True, "use_rslora": True},
    "bias": {"bias": "lora_only"},
    "dora_bias": {"use_dora": True, "bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
}


def adapted(family: str, kind: str, seed: int) -> Any:
    """Return peft's model with random magnitudes and biases in place of trained ones."""
    torch.manual_seed(seed)
    patterns = {"rank_pattern": {FIRST[family]: 5}, "alpha_pattern": {FIRST[family]: 3}}
    targets = EVERY[family] if seed % 2 else SOME[family]
    config = LoraConfig(r=3, init_lora_weights=False, target_modules=targets, fan_in_fan_out=family == "gpt2",
                        **KINDS[kind], **patterns)  # fmt: skip
    model = get_peft_model(make_model(FAMILIES[family]()), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias") and (".base_layer." in name or ".lora_B." in name) and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", sorted(EVERY))
def test_each_kind_continues_as_pefts_model(family: str, tmp_path: Path) -> None:
    """All kinds of adapters, batched with the base model and chunked prompts, continue as peft's model does."""
    base = make_model(FAMILIES[family]())
    bundle = save_bundle(base, tmp_path / "model")
    core = EngineCore(bundle, EngineSettings(max_num_seqs=16, max_num_batched_tokens=32, kv_cache_memory=1 << 24))
    prompt = prompt_of(21, 3)
    wanted = {"base": greedy(base, prompt, MAX_TOKENS)}
    for seed, kind in enumerate(KINDS):
        model = adapted(family, kind, seed)
        model.save_pretrained(tmp_path / kind)
        core.load_adapter(kind, str(tmp_path / kind))
        wanted[kind] = greedy(model, prompt, MAX_TOKENS)
    assert len({tuple(text) for text in wanted.values()}) > len(KINDS) // 2
    names = [*wanted, *reversed(wanted)]
    requests = [
        request_of(f"{i}", prompt, max_tokens=MAX_TOKENS, adapter=None if name == "base" else name)
        for i, name in enumerate(names)
    ]
    outcomes = run(core, *requests)
    for i, name in enumerate(names):
        assert outcomes[f"{i}"].tokens[0] == wanted[name], name
    core.close()


@pytest.mark.parametrize("family", ["llama_wide", "qwen2"])
def test_dora_that_comes_with_a_request_continues_as_pefts_model(family: str, tmp_path: Path) -> None:
    """DoRA sent with a request continues as peft's model, beside plain LoRA and the base, and keeps the linears'
    biases."""
    base = make_model(FAMILIES[family]())
    core = EngineCore(save_bundle(base, tmp_path / "model"), EngineSettings(kv_cache_memory=1 << 24))
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", use_dora=True)
    model = get_peft_model(make_model(FAMILIES[family]()), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    model.save_pretrained(tmp_path / "dora")
    prompt = prompt_of(21, 3)
    dora = task_of(tmp_path / "dora", 1, columns=4, base=base.state_dict())
    outcomes = run(
        core,
        request_of("dora", prompt, max_tokens=MAX_TOKENS, lora_task=dora),
        request_of("plain", prompt, max_tokens=MAX_TOKENS, lora_task=task_of(tmp_path / "dora", 2, columns=4)),
        request_of("base", prompt, max_tokens=MAX_TOKENS),
    )
    assert outcomes["dora"].tokens[0] == greedy(model, prompt, MAX_TOKENS)
    assert outcomes["base"].tokens[0] == greedy(base, prompt, MAX_TOKENS)
    assert len({tuple(outcome.tokens[0]) for outcome in outcomes.values()}) == 3
    core.close()


def broken(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Save an adapter with changed settings and tensors; a tensor given as None is removed."""
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    found = load_file(weights) | tensors
    save_file({key: tensor for key, tensor in found.items() if tensor is not None}, weights)


PREFIX = "base_model.model.model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"),
    [
        ("dora", {"use_dora": False}, {}, "tensor '.*lora_magnitude_vector' is not supported"),
        ("plain", {"use_dora": True}, {}, "lacks its magnitude"),
        ("plain", {"lora_bias": True}, {}, "lacks its lora_bias"),
        ("dora", {}, {f"{PREFIX}.lora_magnitude_vector": torch.ones(3)}, r"has the shape \(3,\), not \(64,\)"),
        ("bias", {}, {"base_model.model.model.norm.base_layer.bias": torch.ones(64)}, "'model.norm' has a tensor"),
        ("plain", {"bias": "all"}, {}, "bias='all' is not supported"),
        ("plain", {"modules_to_save": ["lm_head"]}, {}, "modules_to_save=.* is not supported"),
        ("plain", {}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 9)}, "lora_embedding_A"),
        ("plain", {"trainable_token_indices": [1]}, {}, "trainable_token_indices=.* is not supported"),
        ("plain", {"peft_type": "PREFIX_TUNING"}, {}, "'PREFIX_TUNING' is not supported"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(
    kind: str, config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Adapter settings that would change a result but are not supported are refused by name."""
    adapted("llama_wide", kind, 1).save_pretrained(tmp_path)
    read_adapter(tmp_path)
    broken(tmp_path, config, tensors)
    with pytest.raises(PackagingError, match=message):
        read_adapter(tmp_path)


def test_magnitudes_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Magnitudes that are not finite are refused at load."""
    adapted("llama_wide", "dora", 1).save_pretrained(tmp_path / "x")
    broken(tmp_path / "x", {}, {f"{PREFIX}.lora_magnitude_vector": torch.full((64,), float("nan"))})
    bundle = save_bundle(make_model(FAMILIES["llama_wide"]()), tmp_path / "model")
    core = EngineCore(bundle, EngineSettings(max_num_seqs=2, kv_cache_memory=1 << 22))
    with pytest.raises(InvalidField, match="not finite"):
        core.load_adapter("x", str(tmp_path / "x"))
    core.close()


PROMPTS: dict[str, Any] = {
    "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p_tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
}


def with_prompt(family: str, kind: str) -> Any:
    """Return peft's model with a learned prompt."""
    torch.manual_seed(5)
    return get_peft_model(make_model(FAMILIES[family]()), copy.deepcopy(PROMPTS[kind])).eval()


@torch.inference_mode()
def continued(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Generate greedily with peft's forward alone, because its ``generate`` warns of position ids that it ignores."""
    ids = list(prompt)
    for _ in range(MAX_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama_wide", "gpt2"])
def test_a_learned_prompt_continues_as_pefts_model(family: str, tmp_path: Path) -> None:
    """A learned prompt beside the base and a LoRA adapter continues as peft's model; its tokens and prefixes are its
    own."""
    base = make_model(FAMILIES[family]())
    core = EngineCore(
        save_bundle(base, tmp_path / "model"),
        EngineSettings(max_num_seqs=16, max_num_batched_tokens=8, kv_cache_memory=1 << 24),
    )
    prompt = prompt_of(21, 3)
    models: dict[str, Any] = {kind: with_prompt(family, kind) for kind in PROMPTS} | {
        "lora": adapted(family, "dora", 1)
    }
    wanted = {"base": greedy(base, prompt, MAX_TOKENS)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        core.load_adapter(name, str(tmp_path / name))
        wanted[name] = continued(model, prompt)
    for cached in (0, 20):
        requests = [
            request_of(name, prompt, max_tokens=MAX_TOKENS, adapter=None if name == "base" else name) for name in wanted
        ]
        outcomes = run(core, *requests)
        for name, text in wanted.items():
            assert (outcomes[name].tokens[0], outcomes[name].finished[0].num_cached_tokens) == (text, cached), name
    assert core.parts.runner.num_tables == 0
    core.close()


def test_conflicts_of_a_learned_prompt_are_refused(tmp_path: Path) -> None:
    """A prompt table, prompt scores or a prompt that fills the context are refused together with a learned prompt."""
    core = EngineCore(
        save_bundle(make_model(FAMILIES["llama_wide"]()), tmp_path / "model"),
        EngineSettings(max_num_seqs=4, kv_cache_memory=1 << 24, max_model_len=32),
    )
    with_prompt("llama_wide", "prompt_tuning").save_pretrained(tmp_path / "x")
    core.load_adapter("x", str(tmp_path / "x"))
    table = PromptTable(data=b"\0" * 256, num_tokens=1)
    cases: dict[str, Any] = {
        "prompt_embedding_table": request_of("1", (1, 2), adapter="x", prompt_table=table),
        "echo": request_of("2", (1, 2), adapter="x", prompt_logprobs=1),
        "prompt": request_of("3", prompt_of(27, 1), adapter="x"),
    }
    outcomes = run(core, *cases.values(), request_of("good", prompt_of(26, 1), adapter="x", max_tokens=20))
    for param, request in cases.items():
        failed = outcomes[request.request_id].failed
        assert failed is not None
        assert failed.param == param
    assert (len(outcomes["good"].tokens[0]), outcomes["good"].finished[0].reason) == (1, "length")
    assert core.parts.runner.num_tables == 0
    core.check_integrity()
    core.close()


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, {}, "'PREFIX_TUNING' is not supported"),
        ({"num_virtual_tokens": 4}, {}, r"has the shape \(5, 64\), but num_virtual_tokens is 4"),
        ({"task_type": "SEQ_2_SEQ_LM"}, {}, "task_type='SEQ_2_SEQ_LM' is not supported"),
        ({"num_transformer_submodules": 2}, {}, "num_transformer_submodules=2 is not supported"),
        ({}, {"classifier.weight": torch.ones(2)}, "tensor 'classifier.weight' is not supported"),
        ({}, {"prompt_embeddings": torch.ones(5)}, r"has the shape \(5,\)"),
    ],
)
def test_learned_prompts_that_are_refused(
    config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Prefix tuning and unexpected shapes or tensors are refused by name."""
    with_prompt("llama_wide", "prompt_tuning").save_pretrained(tmp_path)
    assert read_adapter(tmp_path).prompt == (5, 64)
    broken(tmp_path, config, tensors)
    with pytest.raises(PackagingError, match=message):
        check_fits(read_adapter(tmp_path), {}, width=64)


def test_a_learned_prompt_of_another_width_is_refused(tmp_path: Path) -> None:
    """A learned prompt whose vectors do not have the base model's width is refused."""
    with_prompt("llama_wide", "prompt_tuning").save_pretrained(tmp_path)
    for width, said in ((32, "vectors of width 32"), (0, "none")):
        with pytest.raises(PackagingError, match=f"the base takes {said}"):
            check_fits(read_adapter(tmp_path), {}, width=width)
