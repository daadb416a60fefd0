"""Each kind of adapter in docs/adapters.md continues as peft's own model does, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.adapter_files import read_adapter
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.errors import InvalidField, PackagingError
from mlflow_llm.serving.settings import EngineSettings

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
    """peft's model, its magnitudes and biases trained, in a manner of speaking."""
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
    """All kinds in one batch with the base, prompts in chunks, with and without segments of their own."""
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


def broken(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A saved adapter with other settings and tensors; one of None is gone."""
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
def test_what_is_not_run_is_refused_by_name(
    kind: str, config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Nothing that changes a result is left out in silence."""
    adapted("llama_wide", kind, 1).save_pretrained(tmp_path)
    read_adapter(tmp_path)
    broken(tmp_path, config, tensors)
    with pytest.raises(PackagingError, match=message):
        read_adapter(tmp_path)


def test_magnitudes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """A gain that is not finite would fail every request of the adapter."""
    adapted("llama_wide", "dora", 1).save_pretrained(tmp_path / "x")
    broken(tmp_path / "x", {}, {f"{PREFIX}.lora_magnitude_vector": torch.full((64,), float("nan"))})
    bundle = save_bundle(make_model(FAMILIES["llama_wide"]()), tmp_path / "model")
    core = EngineCore(bundle, EngineSettings(max_num_seqs=2, kv_cache_memory=1 << 22))
    with pytest.raises(InvalidField, match="not finite"):
        core.load_adapter("x", str(tmp_path / "x"))
    core.close()
