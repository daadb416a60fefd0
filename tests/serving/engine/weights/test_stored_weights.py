"""Models whose linears were quantised when they were logged: bitwise the same as quantised at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers as tf
from engine_runs import run
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, FAMILIES, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models import loader
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.resolved_settings import ResolvedSettings
from mlflow_llm.serving.engine.quantize.weight_writer import quantize_files
from mlflow_llm.serving.engine.weights import stored_weights
from mlflow_llm.serving.engine.weights.quantization import Int8Weight, quantize_rows, rotated
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "llama with biases": lambda: tf.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "tied head": lambda: tf.Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True),
    "two rotations": lambda: tf.Gemma3TextConfig(
        **WIDE, head_dim=32, sliding_window=37, layer_types=["sliding_attention", "full_attention"]
    ),
    "Conv1D": FAMILIES["gpt2"],
    "experts": FAMILIES["mixtral"],
    "shared expert": lambda: tf.Qwen2MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=80
    ),
    "latent attention": FAMILIES["deepseek_v3"],
}


def quantised(bundle: Bundle, to: Path, tasks: tuple[Any, ...] = ("completions",)) -> Bundle:
    """Save ``bundle`` with its linears in int8 in another directory."""
    shutil.copytree(bundle.model_dir, to)
    quantize_files(to, tasks, "int8")
    return Bundle(content_hash="stored", tasks=tasks, model_dir=str(to), tokenizer_dir="")


def scores(bundle: Bundle, **settings: Any) -> list[Any]:
    """Return log probabilities of a prompt and of the generated tokens."""
    core = EngineCore(bundle, EngineSettings(quantization="int8", kv_cache_memory=1 << 24, packed_cache=0, **settings))
    found = run(core, request_of("r", prompt_of(40, 3), max_tokens=6, prompt_logprobs=2, logprobs=2))["r"]
    core.close()
    return [found.tokens, [None if one is None else one.logprob for one in found.scored[0].logprobs]]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_quantised_at_load(name: str, kernels: str, tmp_path: Path) -> None:
    """With any kernels, logits are bitwise those of the whole weights quantised at load."""
    whole = save_bundle(make_model(MODELS[name]()), tmp_path / "whole")
    stored = quantised(whole, tmp_path / "stored")
    assert scores(stored, kernels=kernels) == scores(whole, kernels=kernels)


def test_nothing_is_kept_twice(tmp_path: Path) -> None:
    """The file has int8 and a scale a row in place of each linear, other tensors once and unchanged, as its
    configuration says."""
    model = make_model(MODELS["tied head"]())
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.bfloat16().float()
    stored = quantised(save_bundle(model, tmp_path / "whole"), tmp_path / "stored")
    found = load_file(tmp_path / "stored/model.safetensors")
    values, scale = found["model.layers.0.mlp.up_proj.weight"], found["model.layers.0.mlp.up_proj.weight_scale"]
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (values.shape[0], 1))
    inputs = found["model.layers.0.mlp.up_proj.weight_inputs"]
    assert torch.equal(inputs, found["model.layers.0.mlp.gate_proj.weight_inputs"])
    weight = rotated(model.model.layers[0].mlp.up_proj.weight / inputs)
    assert ((values * scale - weight).abs() <= 0.501 * scale).all()
    assert "lm_head.weight" not in found
    assert found["lm_head.weight_inputs"].shape == (64,)
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    said = json.loads((tmp_path / "stored/config.json").read_text())["quantization_config"]
    assert (said["format"], said["ignore"]) == ("int8-with-input-factors", ["lm_head"])
    assert stored_weights.quantization_of(stored.model_dir) == "int8"
    groups = said["transform_config"]["config_groups"]
    assert {name: (one["type"], one["head_dim"]) for name, one in groups.items()} == {
        "hadamard_16": ("hadamard", 16),  # 48 inputs
        "hadamard_64": ("hadamard", 64),
        "hadamard_128": ("hadamard", 128),
    }
    online, offline = groups["hadamard_16"]["apply"]
    assert online == {"targets": [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)], "location": "input"}
    assert offline == online | {"location": "weight_input", "inverse": True}


def test_factors_without_the_rotation_are_refused(tmp_path: Path) -> None:
    """Factors of the inputs of weights that are not rotated are refused by the tensor's name."""
    stored = quantised(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole"), tmp_path / "stored")
    file = tmp_path / "stored/config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["transform_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(PackagingError, match=r"proj.weight has factors of its inputs; expected only rotated weights"):
        EngineCore(stored, EngineSettings(quantization="int8"))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_models_stored_without_factors(kernels: Literal["auto", "torch"], tmp_path: Path) -> None:
    """int8 weights that an earlier release stored, rotated but without factors, are multiplied as they are."""
    model = make_model(MODELS["tied head"]())
    stored = quantised(save_bundle(model, tmp_path / "whole"), tmp_path / "stored")
    tensors = load_file(tmp_path / "stored/model.safetensors")
    tensors = {one: value for one, value in tensors.items() if not one.endswith("weight_inputs")}
    for one in [one for one, value in tensors.items() if value.dtype == torch.int8]:
        values, scale = quantize_rows(rotated(model.get_parameter(one).detach()))
        tensors |= {one: values, f"{one}_scale": scale}
    save_file(tensors, tmp_path / "stored/model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "stored/config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= {"quant_method": "compressed-tensors", "format": "int-quantized"}
    file.write_text(json.dumps(config))
    loaded = loader.load_model(stored, EngineSettings(quantization="int8", kernels=kernels, packed_cache=0))
    name = "model.layers.1.mlp.up_proj"
    plain = Int8Weight(model.get_parameter(f"{name}.weight"), None)
    assert torch.equal(loaded.linears.linears[name].weight, plain.dense())
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(loaded.linears.linears[name](x), plain.matmul(x))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_models_stored_without_the_rotation(
    kernels: Literal["auto", "torch"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights without a transform_config are multiplied unrotated, and the log says that others are more exact."""
    model = make_model(MODELS["tied head"]())
    stored = quantised(save_bundle(model, tmp_path / "whole"), tmp_path / "stored")
    assert "not rotated" not in caplog.text
    file, name = tmp_path / "stored/config.json", "model.layers.1.mlp.up_proj"
    tensors = load_file(tmp_path / "stored/model.safetensors")
    tensors = {one: value for one, value in tensors.items() if not one.endswith("weight_inputs")}
    for one in [one for one, value in tensors.items() if value.dtype == torch.int8]:
        values, scale = quantize_rows(model.get_parameter(one).detach())
        tensors |= {one: values, f"{one}_scale": scale}
    save_file(tensors, tmp_path / "stored/model.safetensors", metadata={"format": "pt"})
    config = json.loads(file.read_text())
    del config["quantization_config"]["transform_config"]
    config["quantization_config"] |= {"quant_method": "compressed-tensors", "format": "int-quantized"}
    file.write_text(json.dumps(config))
    loaded = loader.load_model(stored, EngineSettings(quantization="int8", kernels=kernels, packed_cache=0))
    assert "the quantised weights are not rotated" in caplog.text
    found = loaded.linears.linears[name]
    plain = Int8Weight(model.get_parameter(f"{name}.weight"), None, is_rotated=False)
    assert torch.equal(found.weight, plain.dense())
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(found(x), plain.matmul(x))


def of_order_32(name: str, config: Any) -> Any:
    """Return a transform_config with another order for one linear."""
    groups = config["config_groups"].values()
    orders = {one: group["head_dim"] for group in groups for one in group["apply"][0]["targets"]}
    return stored_weights.transform_config(orders | {name: 32})


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said | {"transform_config": 3},
        lambda said: said | {"transform_config": {"config_groups": {"a": {"type": "random-hadamard"}}}},
        lambda said: said | {"transform_config": of_order_32("model.layers.0.mlp.up_proj", said["transform_config"])},
    ],
)
def test_another_transform_is_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """Weights with another transform are refused."""
    stored = quantised(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole"), tmp_path / "stored")
    file = tmp_path / "stored/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": change(config["quantization_config"])}))
    with pytest.raises(PackagingError, match=r"transform_config: .* is not allowed|head_dim 32 is not allowed"):
        EngineCore(stored, EngineSettings(quantization="int8"))


def test_experts_in_the_file(tmp_path: Path) -> None:
    """Experts are stored in int8 with a scale a row; damaged ones are refused by name."""
    stored = quantised(save_bundle(make_model(MODELS["shared expert"]()), tmp_path / "whole"), tmp_path / "stored")
    file, name = tmp_path / "stored/model.safetensors", "model.layers.1.mlp.experts.down_proj"
    whole = load_file(file)
    assert (whole[name].dtype, whole[name].shape) == (torch.int8, (4, 64, 32))
    assert whole[f"{name}_scale"].shape == (4, 64, 1)
    damages = {
        r"of shape \(2, 64, 1\) is not allowed": {f"{name}_scale": whole[f"{name}_scale"][:2].contiguous()},
        r"of shape \(3, 64, 32\) is not allowed": {key: whole[key][:3].contiguous() for key in (name, f"{name}_scale")},
        "lack 1 tensors: .*experts.down_proj": {name: None, f"{name}_scale": None},
    }
    for match, changed in damages.items():
        left = {key: one for key, one in (whole | changed).items() if one is not None}
        save_file(left, file, metadata={"format": "pt"})
        with pytest.raises(PackagingError, match=match):
            EngineCore(stored, EngineSettings(quantization="int8"))


def test_links_are_broken(tmp_path: Path) -> None:
    """Files that are hard links of the caller's own are replaced, not written."""
    source = Path(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole").model_dir)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "stored").mkdir()
    for file in source.iterdir():
        (tmp_path / "stored" / file.name).hardlink_to(file)
    quantize_files(tmp_path / "stored", ("completions",), "int8")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_floats_are_made_a_linear_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are dequantised for the time of a call only, with the same result."""
    for name in ("llama with biases", "shared expert"):
        stored = quantised(save_bundle(make_model(MODELS[name]()), tmp_path / f"{name} whole"), tmp_path / name)
        monkeypatch.setattr(stored_weights, "MAX_CACHED_BYTES", 1 << 30)
        wanted = scores(stored)
        monkeypatch.setattr(stored_weights, "MAX_CACHED_BYTES", 0)
        assert scores(stored) == wanted
        model = loader.from_pretrained(
            tf.AutoModelForCausalLM, stored.model_dir, ResolvedSettings.of(EngineSettings(dtype="float32"))
        )
        model(torch.tensor([[5, 6]]))
        made = {"weight", "gate_up_proj", "down_proj"}
        assert not [path for path, module in model.named_modules() if made & module.__dict__.keys()]


def test_an_encoder(tmp_path: Path) -> None:
    """Embeddings of a stored encoder are bitwise those of an encoder quantised at load."""
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    tf.BertModel(config).save_pretrained(tmp_path / "whole")
    whole = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path / "whole"), tokenizer_dir="")
    stored = quantised(whole, tmp_path / "stored", ("embeddings",))
    settings = EngineSettings(quantization="int8", packed_cache=0)
    texts = [[5, 6, 7], list(range(3, 60))]
    wanted, found = (load_embedder(bundle, settings) for bundle in (whole, stored))
    assert torch.equal(wanted.hidden(texts), found.hidden(texts))


@pytest.mark.parametrize("asked", ["none", "int4"])
def test_weights_that_are_not_stored_are_refused(asked: Any, tmp_path: Path) -> None:
    """An engine asked for a quantisation that is not stored refuses it by the setting's name and value."""
    stored = quantised(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole"), tmp_path / "stored")
    with pytest.raises(PackagingError, match=f"quantization: '{asked}' is not allowed; expected 'int8'"):
        EngineCore(stored, EngineSettings(quantization=asked))


def lose(tensors: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def lose_linear(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def lose_scale(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]


def cut(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :-16].contiguous()


def widen_scale(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name].expand(-1, 3).contiguous()


def scale_norm(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight_scale"] = torch.ones(64, 1)


def lengthen_factors(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight_inputs"] = torch.ones(80)


def zero_factor(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight_inputs"][3] = 0.0


def change_factor(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight_inputs"][3] *= 2.0


def factor_of_norm(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight_inputs"] = torch.ones(64)


def quantise_embedding(tensors: dict[str, Any]) -> None:
    name = "model.embed_tokens.weight"
    tensors |= {name: tensors[name].to(torch.int8), f"{name}_scale": torch.ones(len(tensors[name]), 1)}


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lose, "lack 1 tensors: model.norm.weight"),
        (lose_linear, "lack 1 tensors: model.layers.1.mlp.up_proj.weight"),
        (lose_scale, "model.layers.1.mlp.up_proj.weight is torch.int8 in the weights; expected torch.float32"),
        (cut, r"torch.int8 of shape \(48, 48\) is not allowed; config.json gives torch.int8 of \(48, 64\)"),
        (widen_scale, r"shape \(48, 3\) is not allowed"),
        (scale_norm, "model.norm.weight is stored with a scale; expected weights of a linear, not of Qwen3RMSNorm"),
        (lengthen_factors, r"up_proj.weight_inputs: torch.float32 of shape \(80,\) is not allowed; .* of \(64,\)"),
        (zero_factor, "lm_head.weight_inputs holds factors that are not allowed; expected finite ones above 0"),
        (change_factor, "linears that share an input are stored in different ways"),
        (factor_of_norm, "model.norm.weight_inputs is stored; expected factors of a linear, not of Qwen3RMSNorm"),
        (quantise_embedding, "model.embed_tokens.weight is stored with a scale; expected .*, not of Embedding"),
    ],
)
def test_damaged_weights_are_refused(damage: Callable[[Any], None], match: str, tmp_path: Path) -> None:
    """Damaged weights are refused by the tensor's name."""
    stored = quantised(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole"), tmp_path / "stored")
    tensors = load_file(tmp_path / "stored/model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "stored/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PackagingError, match=match):
        EngineCore(stored, EngineSettings(quantization="int8"))


@pytest.mark.parametrize("asked", ["none", "int8"])
def test_stored_weights_without_their_configuration_are_refused(asked: Any, tmp_path: Path) -> None:
    """Stored weights without a quantization_config are refused."""
    stored = quantised(save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole"), tmp_path / "stored")
    file = tmp_path / "stored/config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(
        PackagingError, match=r"proj.weight is stored as I8, but config.json has no quantization_config"
    ):
        EngineCore(stored, EngineSettings(quantization=asked))


def test_foreign_quantisation_is_refused(tmp_path: Path) -> None:
    """A quantization_config that differs from the written one is refused by that value."""
    bundle = save_bundle(make_model(MODELS["tied head"]()), tmp_path / "whole")
    file = tmp_path / "whole/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(PackagingError, match=r"quantization_config: .*hqq.* is not allowed"):
        EngineCore(bundle, EngineSettings())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.embed_tokens", "model.norm"])
def test_weights_that_are_not_finite(name: str, quantization: str, tmp_path: Path) -> None:
    """Weights that are not finite are refused by name, quantised or not."""
    model = make_model(MODELS["tied head"]())
    model.get_submodule(name).weight.data.view(-1)[3] = torch.inf
    bundle = save_bundle(model, tmp_path / "whole")
    with pytest.raises(PackagingError, match=rf"{name}.weight holds values that are not finite"):
        quantize_files(Path(bundle.model_dir), ("completions",), quantization, [[1, 2, 3]])


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """Finite weights whose logits overflow are refused by calibration and by the engine's self-test."""
    model = make_model(MODELS["tied head"]())
    model.model.layers[1].mlp.down_proj.weight.data[3] = 3e38
    bundle = save_bundle(model, tmp_path / "whole")
    with pytest.raises(PackagingError, match="logits that are not finite, so it cannot be calibrated"):
        quantize_files(Path(bundle.model_dir), ("completions",), "int4", [[1, 2, 3]])
    with pytest.raises(PackagingError, match="the model computes logits that are not finite"):
        EngineCore(bundle, EngineSettings())
