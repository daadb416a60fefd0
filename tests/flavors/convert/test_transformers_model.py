"""``from_transformers_model``: models that ``mlflow.transformers`` saved, with the answers of their pipelines."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import MappingProxyType

import huggingface_hub.constants
import mlflow
import numpy as np
import pytest
import torch
from flavor_models import TEMPLATE, add_lora, byte_tokenizer, tiny_llama
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, pipeline

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.convert.wrapped_base import pristine_names

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = MappingProxyType({"max_new_tokens": 12, "do_sample": False})  # MLflow adds to what it gets
GREEDY_FIELDS = {"max_tokens": 12, "temperature": 0}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def save(path: Path, model, *, tokenizer=None, task="text-generation", **options) -> str:
    """Save a model by mlflow.transformers, with requirements that are not looked up."""
    parts = {"model": model, "tokenizer": tokenizer or byte_tokenizer(chat_template=TEMPLATE)}
    mlflow.transformers.save_model(parts, str(path), task=task, pip_requirements=["mlflow"], **options)
    return str(path)


def imported(uri: str, **arguments):
    """Import a model and load it on a thread of this process."""
    info = llm.from_transformers_model(uri, name="m", **arguments)
    return info, mlflow.pyfunc.load_model(info.model_uri, model_config={"in_process": True})


def texts(model, *asked) -> list[str]:
    """Return the text of the first choice of each answer, and close the model."""
    with llm.closing(model):
        choices = [model.predict(one)["choices"][0] for one in asked]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def generated(model, prompt: str) -> str:
    """Return the continuation by the pipeline of transformers."""
    made = pipeline("text-generation", model=model, tokenizer=byte_tokenizer(chat_template=TEMPLATE))
    return str(made(prompt, return_full_text=False, **GREEDY)[0]["generated_text"])


def test_a_saved_pipeline_continues_texts(store, tmp_path):
    """A text is continued as the pipeline does it, with the parameters of its model_config as defaults."""
    uri = save(tmp_path / "source", tiny_llama(), model_config=dict(GREEDY))
    info, model = imported(uri)
    assert texts(model, "Once upon") == [generated(tiny_llama(), "Once upon")]
    assert info.flavors["llm"]["tasks"] == ["completions", "chat"]
    assert info.flavors["llm"]["request_defaults"] == {"max_tokens": 12, "temperature": 0.0}


def test_a_prompt_template_takes_the_text(store, tmp_path):
    """A prompt template becomes the chat template: ``predict`` of a text answers as the source's, and two messages, for
    which it has no place, are refused."""
    template = 'Q: {prompt} "{{x}}" \\ ü\nA:'
    uri = save(tmp_path / "source", tiny_llama(), prompt_template=template, model_config=dict(GREEDY))
    expected = mlflow.pyfunc.load_model(uri).predict(["Why"])
    assert expected == [generated(tiny_llama(), 'Q: Why "{x}" \\ ü\nA:')]
    info, model = imported(uri)
    two = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2}
    with pytest.raises(MlflowException, match="expected one message of the user"):
        model.predict(two)
    assert texts(model, "Why") == expected
    assert info.metadata["prompt_template"] == template
    assert sorted(llm.load_bundle(info.model_uri).chat_templates) == ["default", "tokenizer"]


def test_a_chat_uses_the_tokenizers_template(store, tmp_path):
    """A model of task llm/v1/chat answers messages as ``generate`` of the templated text does."""
    uri = save(tmp_path / "source", tiny_llama(), task="llm/v1/chat", metadata={"team": "a"})
    info, model = imported(uri, defaults={"max_tokens": 12, "temperature": 0})
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    assert texts(model, asked) == [generated(tiny_llama(), "<|user|>Hi\n<|assistant|>")]
    assert (info.metadata["team"], info.metadata["task"]) == ("a", "llm/v1/chat")


def test_parameters_of_the_signature_are_defaults(store, tmp_path, caplog):
    """Defaults of the signature's params come over those of model_config; what has no effect here is named."""
    text = Schema([ColSpec(DataType.string)])
    params = ParamSchema([ParamSpec("max_new_tokens", "long", 5), ParamSpec("do_sample", "boolean", False)])
    config = {"max_new_tokens": 50, "num_beams": 3, "include_prompt": True}
    signature = ModelSignature(inputs=text, outputs=text, params=params)
    uri = save(tmp_path / "source", tiny_llama(), model_config=config, signature=signature)
    info, model = imported(uri, defaults={"seed": 4})
    llm.close(model)
    assert info.flavors["llm"]["request_defaults"] == {"max_tokens": 5, "temperature": 0.0, "seed": 4}
    assert "parameters of the saved model that have no effect here: num_beams=3; include_prompt=True" in caplog.text


def test_an_adapter_on_a_local_base_is_taken_apart(store, tmp_path):
    """The base that mlflow.transformers writes with the adapter's modules inside is pristine again, both adapters are
    there, and the one that the source answers with is the default. Its run is known."""
    peft_model = add_lora(tiny_llama())
    peft_model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with mlflow.start_run() as run:
        logged = mlflow.transformers.log_model(
            {"model": peft_model, "tokenizer": byte_tokenizer(chat_template=TEMPLATE)},
            name="source",
            task="text-generation",
            pip_requirements=["mlflow"],
            registered_model_name="old",
        )
    source = Path(mlflow.artifacts.download_artifacts(logged.model_uri))
    before = (source / "model" / "model.safetensors").read_bytes()
    with mlflow.start_run() as importing:
        info, model = imported("models:/old/1", defaults=GREEDY_FIELDS, registered_model_name="new")
    bundle = llm.load_bundle(info.model_uri)
    stored, original = load_file(f"{bundle.model_dir}/model.safetensors"), tiny_llama().state_dict()
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[key], original[key]) for key in stored)
    assert (sorted(bundle.adapters), bundle.default_adapter) == (["default", "second"], "default")
    assert texts(model, "Once upon") == [generated(add_lora(tiny_llama()).merge_and_unload(), "Once upon")]
    params = mlflow.get_logged_model(info.model_id).params
    assert params["llm.adapter.default.run_id"] == run.info.run_id
    tags = MlflowClient().get_model_version("new", "1").tags
    assert tags["llm.imported_from"] == "models:/old/1"
    [linked] = MlflowClient().get_run(importing.info.run_id).inputs.model_inputs
    assert linked.model_id == logged.model_id
    assert (source / "model" / "model.safetensors").read_bytes() == before


def test_a_base_in_a_directory_is_read_from_there(store, llama_dir, tmp_path):
    """A peft model saved with ``base_model_path`` takes its base from there; a base that is gone is refused by its
    place, and ``model=`` names another."""
    moved = tmp_path / "base"
    shutil.copytree(llama_dir, moved)
    uri = save(tmp_path / "source", add_lora(tiny_llama()), base_model_path=str(moved))
    _, model = imported(uri, defaults=GREEDY_FIELDS)
    assert texts(model, "Once upon") == [generated(add_lora(tiny_llama()).merge_and_unload(), "Once upon")]
    shutil.rmtree(moved)
    with pytest.raises(MlflowException, match=r"its base is referenced as .*, which is not on this machine"):
        llm.from_transformers_model(uri, name="m")
    info = llm.from_transformers_model(uri, name="m", model=llama_dir)
    assert info.flavors["llm"]["adapters"] == ["default"]


@pytest.fixture
def hub(llama_dir, tmp_path, monkeypatch):
    """Provide a cache of the hub with the tiny Llama at one commit, and no network."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama_dir, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("ffff")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mlflow.transformers.flavor_config.get_latest_commit_for_repo", lambda repo: COMMIT)


def test_a_reference_is_fetched_by_name_and_revision(store, hub, tmp_path):
    """A model saved without its weights is fetched at the commit that it has stored, and is named by its id."""
    named = tiny_llama()
    named.config.name_or_path = named.name_or_path = "someone/tiny"
    uri = save(tmp_path / "source", named, save_pretrained=False, model_config=dict(GREEDY))
    assert not (Path(uri) / "model").exists()
    info, model = imported(uri)
    assert texts(model, "Once upon") == [generated(tiny_llama(), "Once upon")]
    assert info.flavors["llm"]["facts"]["name"] == "someone/tiny"
    assert info.flavors["llm"]["tasks"] == ["completions", "chat"]


def test_a_reference_that_is_gone_is_refused(store, hub, tmp_path):
    """A reference to a repository that cannot be fetched is refused by its name."""
    named = tiny_llama()
    named.config.name_or_path = named.name_or_path = "someone/gone"
    uri = save(tmp_path / "source", named, save_pretrained=False)
    with pytest.raises(MlflowException, match="'someone/gone' is not a local path and could not be fetched"):
        llm.from_transformers_model(uri, name="m")


def test_embeddings_are_those_of_the_first_token(store, bert_dir, tmp_path):
    """A model of task llm/v1/embeddings gives the vectors that mlflow.transformers gave."""
    tokenizer = AutoTokenizer.from_pretrained(bert_dir)
    uri = save(tmp_path / "source", AutoModel.from_pretrained(bert_dir), tokenizer=tokenizer, task="llm/v1/embeddings")
    expected = mlflow.pyfunc.load_model(uri).predict({"input": "a fox"})["data"][0]["embedding"]
    _, model = imported(uri)
    with llm.closing(model):
        found = model.predict("a fox")["data"][0]["embedding"]
    assert np.allclose(found, expected, atol=1e-5)


def test_a_type_that_was_asked_for_is_kept(store, tmp_path):
    """``torch_dtype`` that differs from the stored weights is the engine's dtype."""
    uri = save(tmp_path / "source", tiny_llama(), torch_dtype=torch.bfloat16)
    info, model = imported(uri)
    llm.close(model)
    config = Model.load(info.model_uri).flavors["python_function"]["config"]
    assert config["dtype"] == "bfloat16"


def test_other_models_are_refused(store, llama_dir, tmp_path):
    """A model of another flavor or task, and a directory that is none, are refused by name."""
    llm.save_model(tmp_path / "ours", llama_dir)
    with pytest.raises(MlflowException, match="is a model of this flavor already"):
        llm.from_transformers_model(tmp_path / "ours", name="m")
    with pytest.raises(MlflowException, match="holds no MLmodel"):
        llm.from_transformers_model(llama_dir, name="m")
    with pytest.raises(MlflowException, match="model_uri: None is not allowed"):
        llm.from_transformers_model(None, name="m")
    uri = save(tmp_path / "source", tiny_llama())
    described = Model.load(uri)
    described.flavors["transformers"]["task"] = "fill-mask"
    described.save(f"{uri}/MLmodel")
    with pytest.raises(MlflowException, match="its task 'fill-mask' is not supported; expected one of llm/v1/chat"):
        llm.from_transformers_model(uri, name="m")
    described.flavors["sklearn"] = described.flavors.pop("transformers")
    described.save(f"{uri}/MLmodel")
    with pytest.raises(MlflowException, match="its flavors are python_function, sklearn"):
        llm.from_transformers_model(uri, name="m")


def test_names_within_wrappers() -> None:
    """Tensors of wrapped modules get their own names, those of adapters are dropped, all others stay."""
    found = pristine_names(
        [
            "a.q.base_layer.weight",
            "a.q.lora_A.x.weight",
            "h.original_module.weight",
            "h.modules_to_save.x.weight",
            "b.w",
        ]
    )
    assert found == {"a.q.base_layer.weight": "a.q.weight", "h.original_module.weight": "h.weight", "b.w": "b.w"}
    assert pristine_names(["a.weight"]) is None
