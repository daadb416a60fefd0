"""Models with adapters taken apart, and adapters given beside a model."""

import json

import peft
import pytest
import torch
from flavor_models import add_lora, byte_tokenizer, logits, randomise, tiny_llama
from mlflow.exceptions import MlflowException
from packaging.version import Version
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from mlflow_llm.flavors import llm
from mlflow_llm.serving.engine.adapters.files import REFUSED


def base_of(bundle):
    return AutoModelForCausalLM.from_pretrained(bundle.model_dir).eval()


def with_adapter(bundle, name):
    return PeftModel.from_pretrained(base_of(bundle), bundle.adapters[name]).eval()


def test_peft_model_is_split(tmp_path, tokenizer):
    """Base and every adapter come back with the logits they had, and the caller's object is not touched."""
    pristine = logits(tiny_llama())
    model = add_lora(tiny_llama(), "formal", seed=1)
    model.add_adapter("casual", LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=["up_proj", "o_proj"]))
    randomise(model, "casual", 2)
    expected = {}
    for name in ("formal", "casual"):
        model.set_adapter(name)
        expected[name] = logits(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)

    bundle = llm.load_bundle(tmp_path / "m")
    assert sorted(bundle.adapters) == ["casual", "formal"]
    assert not any("lora" in key or "base_layer" in key for key in load_file(f"{bundle.model_dir}/model.safetensors"))
    assert torch.equal(logits(base_of(bundle)), pristine)
    for name, wanted in expected.items():
        assert torch.equal(logits(with_adapter(bundle, name)), wanted)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert model.active_adapter == "casual"


def takes_this_peft() -> bool:
    """Return whether transformers adds adapters with the installed PEFT: a release of it may ask for the next one."""
    return Version(peft.__version__) >= Version(MIN_PEFT_VERSION)


@pytest.mark.skipif(not takes_this_peft(), reason=f"transformers adds adapters from PEFT {MIN_PEFT_VERSION} on")
def test_adapters_added_to_a_transformers_model(tmp_path, tokenizer):
    """A transformers model with ``add_adapter`` is taken apart like a PeftModel."""
    pristine = logits(tiny_llama())
    model = tiny_llama()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="formal")
    randomise(model, "formal", 5)
    expected = logits(model)
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    bundle = llm.load_bundle(tmp_path / "m")
    assert torch.equal(logits(base_of(bundle)), pristine)
    assert torch.equal(logits(with_adapter(bundle, "formal")), expected)


def test_tied_base_is_split(tmp_path, tokenizer):
    """A base with a tied head is stored tied."""
    model = add_lora(tiny_llama(tie_word_embeddings=True))
    expected = logits(model)
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    bundle = llm.load_bundle(tmp_path / "m")
    assert base_of(bundle).config.tie_word_embeddings
    assert torch.equal(logits(with_adapter(bundle, "default")), expected)


def test_adapters_beside_a_directory(tmp_path, llama_dir, adapter_dir):
    """Adapters come from a directory and from a PeftModel, under the names the caller gives."""
    model = add_lora(tiny_llama(), seed=7)
    expected = logits(model)
    llm.save_model(tmp_path / "m", llama_dir, adapters={"formal": adapter_dir, "casual": model})
    bundle = llm.load_bundle(tmp_path / "m")
    assert sorted(bundle.adapters) == ["casual", "formal"]
    stored = load_file(f"{bundle.adapters['formal']}/adapter_model.safetensors")
    given = load_file(adapter_dir / "adapter_model.safetensors")
    assert stored.keys() == given.keys()
    assert all(torch.equal(stored[key], given[key]) for key in given)
    assert torch.equal(logits(with_adapter(bundle, "casual")), expected)


def test_no_path_of_this_machine_is_stored(tmp_path, llama_dir):
    """The base's path, which peft writes into adapter_config.json, is not kept; a hub id is."""
    model = add_lora(AutoModelForCausalLM.from_pretrained(llama_dir))
    assert model.peft_config["default"].base_model_name_or_path == str(llama_dir)
    llm.save_model(tmp_path / "m", llama_dir, adapters={"x": model})
    config = json.loads((tmp_path / "m/adapters/x/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    model.peft_config["default"].base_model_name_or_path = "someone/tiny"
    llm.save_model(tmp_path / "n", llama_dir, adapters={"x": model})
    config = json.loads((tmp_path / "n/adapters/x/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"


def test_pickled_adapter_is_converted(tmp_path, llama_dir, adapter_dir):
    """adapter_model.bin becomes adapter_model.safetensors."""
    source = tmp_path / "old"
    source.mkdir()
    (source / "adapter_config.json").write_bytes((adapter_dir / "adapter_config.json").read_bytes())
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    torch.save(tensors, source / "adapter_model.bin")
    llm.save_model(tmp_path / "m", llama_dir, adapters={"x": source})
    stored = load_file(tmp_path / "m/adapters/x/adapter_model.safetensors")
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
    assert [p.name for p in (tmp_path / "m/adapters/x").glob("*.bin")] == []


def test_merged_adapter_is_refused(tmp_path, tokenizer):
    """A base with an adapter merged into its weights is refused."""
    model = add_lora(tiny_llama())
    model.merge_adapter()
    with pytest.raises(MlflowException, match=r"an adapter is merged into .*unmerge_adapter"):
        llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", ".hidden", "x" * 129, 7, "dot."])
def test_names_that_are_refused(tmp_path, llama_dir, adapter_dir, name):
    """Adapter names that are unsafe as a folder or in a request are refused."""
    with pytest.raises(MlflowException, match=r"adapters: the name .* is not allowed"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={name: adapter_dir})


def test_adapter_of_another_shape(tmp_path, llama_dir):
    """An adapter trained on a base of another size is refused with module and shapes."""
    other = add_lora(tiny_llama(hidden_size=64))
    with pytest.raises(MlflowException, match=r"q_proj.*shape \(64, 64\).*\(32, 32\)"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={"x": other})


def test_adapter_of_unknown_modules(tmp_path, llama_dir, adapter_dir):
    """An adapter of a module that the base lacks is refused by the module's name."""
    source = tmp_path / "odd"
    source.mkdir()
    (source / "adapter_config.json").write_bytes((adapter_dir / "adapter_config.json").read_bytes())
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    renamed = {key.replace("q_proj", "query_key_value"): tensor for key, tensor in tensors.items()}
    save_file(renamed, source / "adapter_model.safetensors")
    with pytest.raises(MlflowException, match=r"no linear module .*query_key_value"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={"x": source})


ODD_VALUES = {
    "use_bdlora": True,
    "use_qalora": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [3],
    "target_parameters": ["experts.weight"],
    "layer_replication": [[0, 1]],
    "alora_invocation_tokens": [3],
    "arrow_config": {},
    "monteclora_config": {},
    "kasa_config": {},
    "bias": "all",
    "init_lora_weights": "pissa",
    "peft_type": "IA3",
}


@pytest.mark.parametrize("key", [*REFUSED, "init_lora_weights", "peft_type"])
def test_adapter_kinds_that_are_refused(tmp_path, llama_dir, adapter_dir, key):
    """A peft type or option that would change the result is refused by name, with the adapter's name."""
    source = tmp_path / "odd"
    source.mkdir()
    config = json.loads((adapter_dir / "adapter_config.json").read_text()) | {key: ODD_VALUES[key]}
    (source / "adapter_config.json").write_text(json.dumps(config))
    (source / "adapter_model.safetensors").write_bytes((adapter_dir / "adapter_model.safetensors").read_bytes())
    named = "'IA3' is not supported" if key == "peft_type" else key
    with pytest.raises(MlflowException, match=f"'mine'.*{named}"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={"mine": source})


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' is the output head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
)
def test_peft_models_that_are_refused(tmp_path, tokenizer, options, reason):
    """A PeftModel with features that the engine cannot run is refused by name when the model is logged."""
    model = add_lora(tiny_llama(), "mine", **options)
    with pytest.raises(MlflowException, match=f"'mine'.*{reason}"):
        llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    assert not (tmp_path / "m").exists()


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")  # lora_bias on linears without a bias
@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"bias": "lora_only"}], ids=str)
def test_peft_models_that_are_packaged(tmp_path, tokenizer, options):
    """A PeftModel with supported tensors beside A and B is packaged with them."""
    llm.save_model(tmp_path / "m", add_lora(tiny_llama(), "mine", **options), tokenizer=tokenizer)
    assert "mine" in llm.load_bundle(tmp_path / "m").adapters


def test_learned_prompts_are_packaged(tmp_path, tokenizer, llama_dir):
    """Learned prompts of a PeftModel and of a directory are packaged without their encoder; prefix tuning is
    refused."""
    model = get_peft_model(tiny_llama(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    saved = tmp_path / "m/adapters/default"
    assert list(load_file(saved / "adapter_model.safetensors")) == ["prompt_embeddings"]
    llm.save_model(tmp_path / "n", llama_dir, adapters={"polite": saved})
    assert "polite" in llm.load_bundle(tmp_path / "n").adapters
    prefix = get_peft_model(tiny_llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(MlflowException, match="'PREFIX_TUNING' is not supported"):
        llm.save_model(tmp_path / "o", prefix, tokenizer=tokenizer)


def test_invalid_adapters_are_refused(tmp_path, llama_dir):
    """A directory without an adapter, a model without one, and a wrong type are refused."""
    with pytest.raises(MlflowException, match=r"holds no adapter_config\.json"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={"x": llama_dir})
    with pytest.raises(MlflowException, match="is a LlamaForCausalLM; expected a PeftModel"):
        llm.save_model(tmp_path / "m", llama_dir, adapters={"x": tiny_llama()})
    with pytest.raises(MlflowException, match=r"expected \{name: PeftModel or directory\}"):
        llm.save_model(tmp_path / "m", llama_dir, adapters=["x"])


def test_default_adapter_must_exist(tmp_path, llama_dir, adapter_dir):
    """The default adapter must be one of the model's, and is saved with it."""
    llm.save_model(tmp_path / "m", llama_dir, adapters={"x": adapter_dir}, default_adapter="x")
    assert json.loads((tmp_path / "m/manifest.json").read_text())["default_adapter"] == "x"
    assert llm.load_bundle(tmp_path / "m").default_adapter == "x"
    with pytest.raises(MlflowException, match="default_adapter: 'y' is not an adapter of the model; it has x"):
        llm.save_model(tmp_path / "n", llama_dir, adapters={"x": adapter_dir}, default_adapter="y")


def test_tokenizer_larger_than_the_embedding(tmp_path, llama_dir):
    """A tokenizer that can give an id without an embedding row is refused with the token and both sizes."""
    large = byte_tokenizer()
    large.add_tokens([f"word{i}" for i in range(20)])
    with pytest.raises(MlflowException, match=r"token 'word19' has id 280 but the model's embedding has 272 rows"):
        llm.save_model(tmp_path / "m", llama_dir, tokenizer=large)


@pytest.mark.parametrize("kind", [LoraConfig, PromptTuningConfig], ids=lambda kind: kind.__name__)
def test_a_model_whose_adapters_were_deleted(tmp_path, kind):
    """It is packaged as its base; as somebody's adapter it is refused by name."""
    options = {"task_type": "CAUSAL_LM"}
    options |= {"target_modules": ["q_proj"]} if kind is LoraConfig else {"num_virtual_tokens": 2}
    model = get_peft_model(tiny_llama(), kind(**options))
    model.delete_adapter("default")
    llm.save_model(tmp_path / "m", model=model, tokenizer=byte_tokenizer())
    bundle = llm.load_bundle(tmp_path / "m")
    assert bundle.adapters == {}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(bundle.model_dir)), logits(tiny_llama()))
    with pytest.raises(MlflowException, match="the model given for 'one' has no adapters; all were deleted"):
        llm.save_model(tmp_path / "n", model=tiny_llama(), tokenizer=byte_tokenizer(), adapters={"one": model})
