"""Adapters logged alone over a registered base."""

import json
import shutil
from pathlib import Path

import mlflow
import pytest
import torch
from flavor_models import add_lora, byte_tokenizer, logits, tiny_llama
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.interface.errors import PackagingError


@pytest.fixture
def base(store, llama_dir):
    """Register a whole model as models:/assistant/1."""
    llm.log_model(llama_dir, name="assistant", registered_model_name="assistant")
    return "models:/assistant/1"


def log_alone(adapter, **options):
    return llm.log_model(name="adapter", registered_model_name="assistant", adapters={"formal": adapter}, **options)


def test_serves_as_if_whole(base, adapter_dir):
    """The version holds the adapter alone, and loads with base, tokenizer and template of the base."""
    log_alone(adapter_dir, base=base, default_adapter="formal")
    root = Path(mlflow.artifacts.download_artifacts("models:/assistant/2"))
    assert not (root / "model").exists()
    assert not (root / "tokenizer").exists()
    bundle, whole = llm.load_bundle("models:/assistant/2"), llm.load_bundle(base)
    assert bundle.tasks == whole.tasks == ("chat", "completions")
    assert (bundle.model_dir, bundle.tokenizer_dir) == (whole.model_dir, whole.tokenizer_dir)
    assert bundle.chat_templates == whole.chat_templates
    assert (bundle.default_adapter, whole.default_adapter) == ("formal", None)
    assert bundle.content_hash != whole.content_hash
    model = AutoModelForCausalLM.from_pretrained(bundle.model_dir)
    wrapped = PeftModel.from_pretrained(model, bundle.adapters["formal"]).eval()
    assert torch.equal(logits(wrapped), logits(add_lora(tiny_llama())))
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["base"] == {"uri": base, "content_hash": whole.content_hash}
    assert manifest["default_adapter"] == "formal"


def test_answers_as_if_whole(base, llama_dir, adapter_dir):
    """An adapter logged alone answers token for token like one logged with its base."""
    log_alone(adapter_dir, base=base)
    llm.log_model(llama_dir, name="whole", registered_model_name="whole", adapters={"formal": adapter_dir})
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts = {}
    for uri in ("models:/assistant/2", "models:/whole/1"):
        model = mlflow.pyfunc.load_model(uri, model_config={"in_process": True})
        for adapter in (None, "formal"):
            texts[uri, adapter] = model.predict(body | {"adapter": adapter})["choices"][0]["text"]
        model.get_raw_model().close()
    assert texts["models:/assistant/2", "formal"] == texts["models:/whole/1", "formal"]
    assert texts["models:/assistant/2", None] == texts["models:/whole/1", None]
    assert texts["models:/assistant/2", "formal"] != texts["models:/assistant/2", None]


def test_without_weights(base, adapter_dir):
    """For a remote engine the weights of adapter and base may be missing, but no other file."""
    log_alone(adapter_dir, base=base)
    whole = llm.load_bundle("models:/assistant/2")
    (Path(whole.model_dir) / "model.safetensors").unlink()
    (Path(whole.adapters["formal"]) / "adapter_model.safetensors").unlink()
    root = Path(mlflow.artifacts.download_artifacts("models:/assistant/2"))
    assert read_bundle(root, weights=False) == whole
    with pytest.raises(MlflowException, match=r"adapters/formal/adapter_model\.safetensors is missing"):
        llm.load_bundle("models:/assistant/2")
    (Path(whole.adapters["formal"]) / "adapter_config.json").unlink()
    with pytest.raises(PackagingError, match=r"adapters/formal/adapter_config\.json is missing"):
        read_bundle(root, weights=False)


def test_alias_is_pinned(base, adapter_dir):
    """An alias or "latest" is stored as the version it names when the adapter is logged."""
    MlflowClient().set_registered_model_alias("assistant", "best", 1)
    log_alone(adapter_dir, base="models:/assistant@best")
    root = Path(mlflow.artifacts.download_artifacts("models:/assistant/2"))
    assert json.loads((root / "manifest.json").read_text())["base"]["uri"] == base
    with pytest.raises(MlflowException, match="holds only an adapter; name its own base, models:/assistant/1"):
        log_alone(adapter_dir, base="models:/assistant/latest")


SAVED = {
    "defaults": {"max_tokens": 5, "temperature": 0.5, "top_k": None},
    "generation_config": {"top_k": 3, "top_p": 0.9},
    "max_model_len": 100,
    "max_num_seqs": 2,
    "default_adapter": "casual",
    "pinned_adapters": ["casual"],
}


def config_over(adapter_dir, base, **given):
    """Return the configuration of an adapter logged over ``base``, and its request defaults."""
    saved = Model.load(log_alone(adapter_dir, base=base, **given).model_uri)
    return saved.flavors["python_function"]["config"], saved.flavors["llm"]["request_defaults"]


@pytest.fixture
def base_with_settings(store, llama_dir, adapter_dir):
    llm.log_model(llama_dir, name="b", registered_model_name="assistant", adapters={"casual": adapter_dir}, **SAVED)
    return "models:/assistant/1"


@pytest.mark.parametrize(
    ("given", "config", "defaults"),
    [
        ({}, SAVED, {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}),
        (
            {"defaults": {"max_tokens": None, "top_k": 2}},
            SAVED | {"defaults": {"max_tokens": None, "temperature": 0.5, "top_k": 2}},
            {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
        ),
        ({"defaults": {}}, SAVED | {"defaults": {}}, {"top_k": 3, "top_p": 0.9}),
        ({"generation_config": {}}, SAVED | {"generation_config": {}}, {"max_tokens": 5, "temperature": 0.5}),
        (
            {"model_config": {"max_model_len": None, "default_adapter": None, "pinned_adapters": []}},
            SAVED | {"max_model_len": None, "default_adapter": None, "pinned_adapters": []},
            {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        ),
        (
            {"max_num_seqs": 3, "default_adapter": "formal"},
            SAVED | {"max_num_seqs": 3, "default_adapter": "formal"},
            {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        ),
    ],
    ids=["nothing", "one default", "no defaults", "no generation config", "nulls", "other settings"],
)
def test_it_is_configured_as_its_base(base_with_settings, adapter_dir, given, config, defaults):
    """The base's saved settings hold unless overridden; null removes one."""
    found, request_defaults = config_over(adapter_dir, base_with_settings, **given)
    assert {name: found[name] for name in SAVED} == config
    assert request_defaults == defaults
    bundle = llm.load_bundle("models:/assistant/2")
    assert bundle.default_adapter == config["default_adapter"]


def test_the_generation_config_of_an_older_base(base_with_settings, adapter_dir):
    """For a base saved before generation_config was a setting, its file gives the defaults."""
    root = Path(mlflow.artifacts.download_artifacts(base_with_settings))
    saved = Model.load(str(root))
    del saved.flavors["python_function"]["config"]["generation_config"]
    saved.save(str(root / "MLmodel"))
    file = root / "model" / "generation_config.json"
    file.write_text(json.dumps({"top_p": 0.25}).ljust(file.stat().st_size))
    assert config_over(adapter_dir, base_with_settings)[0]["generation_config"] == {"top_p": 0.25}


def test_code_of_a_base_is_not_trusted_by_its_word(store, llama_dir, adapter_dir):
    """The base's trust_remote_code is not inherited: logging the adapter must set it."""
    llm.log_model(llama_dir, name="b", registered_model_name="assistant", trust_remote_code=True, max_num_seqs=2)
    found, _ = config_over(adapter_dir, "models:/assistant/1")
    assert (found["trust_remote_code"], found["max_num_seqs"]) == (False, 2)
    found, _ = config_over(adapter_dir, "models:/assistant/1", trust_remote_code=True)
    assert found["trust_remote_code"] is True


def test_base_that_changed_is_refused(base, adapter_dir, store):
    """A base whose content hash is not the recorded one is refused when the adapter is loaded."""
    log_alone(adapter_dir, base=base)
    root = Path(mlflow.artifacts.download_artifacts(base))
    other = store / "other"
    llm.save_model(other, tiny_llama(seed=9), tokenizer=byte_tokenizer())
    for name in ("model", "tokenizer", "manifest.json"):
        target = root / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        shutil.move(other / name, target)
    (root / "chat_template.jinja").unlink()
    llm.load_bundle(base)
    with pytest.raises(MlflowException, match="is not the model this adapter was logged over"):
        llm.load_bundle("models:/assistant/2")


def test_adapters_of_the_base_stay(store, llama_dir, adapter_dir):
    """A base's own adapters stay beside the new one, and a name cannot be used twice."""
    llm.log_model(llama_dir, name="a", registered_model_name="assistant", adapters={"casual": adapter_dir})
    log_alone(adapter_dir, base="models:/assistant/1")
    assert sorted(llm.load_bundle("models:/assistant/2").adapters) == ["casual", "formal"]
    with pytest.raises(MlflowException, match="the base already has an adapter 'casual'"):
        llm.log_model(name="b", adapters={"casual": adapter_dir}, base="models:/assistant/1")


def test_own_template_and_tokenizer(base, adapter_dir):
    """A template or tokenizer logged with the adapter replaces the base's."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    log_alone(adapter_dir, base=base, chat_template=template, tokenizer=byte_tokenizer())
    bundle = llm.load_bundle("models:/assistant/2")
    assert Path(bundle.chat_templates["default"]).read_text() == template
    assert bundle.tokenizer_dir != llm.load_bundle(base).tokenizer_dir


def test_adapter_that_does_not_fit(base, adapter_dir):
    """The adapter is checked against the registered base when it is logged."""
    with pytest.raises(MlflowException, match=r"\(64, 64\)"):
        log_alone(add_lora(tiny_llama(hidden_size=64)), base=base)


def test_bases_that_are_refused(base, llama_dir, adapter_dir, tmp_path):
    """A path, a missing version, a model beside base, and a base without adapters are refused."""
    with pytest.raises(MlflowException, match="expected models:/<name>/<version>"):
        log_alone(adapter_dir, base=str(llama_dir))
    with pytest.raises(MlflowException, match=r"base: models:/assistant/77: .* has no version .77.; it has version 1"):
        log_alone(adapter_dir, base="models:/assistant/77")
    with pytest.raises(MlflowException, match="pass either model= or"):
        llm.save_model(tmp_path / "m", llama_dir, base=base, adapters={"x": adapter_dir})
    with pytest.raises(MlflowException, match="it needs adapters="):
        llm.save_model(tmp_path / "m", base=base)
    with pytest.raises(MlflowException, match="the base cannot answer 'embeddings'"):
        log_alone(adapter_dir, base=base, task="embeddings")
