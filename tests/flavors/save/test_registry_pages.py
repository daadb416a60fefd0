"""MLflow's pages of a logged model: params, tags, metrics, description, and the lineage of its adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.tracking._model_registry.client import ModelRegistryClient

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import manifest as manifests
from mlflow_llm.flavors.llm.model.stored_facts import stored_facts
from mlflow_llm.flavors.llm.save import registry_pages


@pytest.fixture
def carded(llama_dir, tmp_path):
    """Provide the tiny Llama with a model card that has a licence."""
    root = tmp_path / "carded"
    shutil.copytree(llama_dir, root)
    (root / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Tiny\n")
    return root


def trained(adapter_dir):
    """Log a run with a dataset and an adapter as its artifact, and return its id."""
    with mlflow.start_run() as run:
        rows = mlflow.data.from_pandas(pd.DataFrame({"text": ["a"]}), name="letters")
        mlflow.log_input(rows, context="training")
        mlflow.log_artifacts(str(adapter_dir), "adapter")
    return run.info.run_id


def base_hash(info):
    """Return the content hash of the files in ``model/``, as the manifest has them."""
    files = manifests.read(Path(mlflow.artifacts.download_artifacts(info.model_uri))).files
    return manifests.content_hash_of({path: one for path, one in files.items() if path.startswith("model/")})


def test_params_tags_metrics_and_description(store, carded, adapter_dir):
    """Logged model and version say what they are; what the user set stays, and the run's own params are not touched."""
    with mlflow.start_run() as run:
        mlflow.log_param("dtype", "of the training")
        info = llm.log_model(
            carded,
            name="assistant",
            adapters={"formal": adapter_dir},
            registered_model_name="assistant",
            params={"llm.tasks": "mine"},
            tags={"llm.dtype": "mine", "team": "a"},
            max_model_len=128,
        )
    client = MlflowClient()
    logged = client.get_logged_model(info.model_id)
    weights = (carded / "model.safetensors").stat().st_size
    assert logged.params == {
        "dtype": "of the training",
        "llm.tasks": "mine",
        "llm.base": "carded",
        "llm.content_hash": info.flavors["llm"]["content_hash"],
        "llm.base_hash": base_hash(info),
        "llm.architecture": "LlamaForCausalLM",
        "llm.parameters": str(272 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 64) + 32),
        "llm.weight_bytes": str(weights),
        "llm.dtype": "float32",
        "llm.quantization": "none",
        "llm.context_length": "128",
        "llm.license": "apache-2.0",
        "llm.adapters": "formal",
        "llm.adapter.formal.method": "LORA",
        "llm.adapter.formal.rank": "4",
        "llm.adapter.formal.base": "carded",
    }
    assert (logged.tags["llm.dtype"], logged.tags["team"]) == ("mine", "a")
    assert logged.tags["llm.license"] == "apache-2.0"
    assert {metric.key: metric.value for metric in logged.metrics}["llm.weight_bytes"] == weights
    assert client.get_run(run.info.run_id).data.params == {"dtype": "of the training"}
    version = client.get_model_version("assistant", "1")
    assert (version.tags["llm.dtype"], version.tags["llm.architecture"]) == ("mine", "LlamaForCausalLM")
    assert "mlflow-llm serve -m models:/assistant/1" in version.description
    assert version.description == logged.tags["mlflow.note.content"]
    assert client.search_model_versions("tags.`llm.license` = 'apache-2.0'")[0].version == 1


def test_without_a_run_and_without_a_version(store, llama_dir):
    """Without a run there are params and a description, which serves the model by its id, but no metrics."""
    info = llm.log_model(llama_dir, name="m")
    logged = mlflow.get_logged_model(info.model_id)
    assert logged.params["llm.base"] == "tiny-llama"
    assert f"mlflow-llm serve -m {info.model_uri}\n" in logged.tags["mlflow.note.content"]
    assert not logged.metrics


@pytest.mark.parametrize("given", ["runs", "run id", "models", "own"])
def test_adapters_know_their_run_and_its_data(store, llama_dir, adapter_dir, given):
    """An adapter given by URI, or with the id of its run, is linked to that run and to its dataset, also when it is
    taken from a model of this flavor."""
    run_id = trained(adapter_dir)
    source = f"runs:/{run_id}/adapter"
    adapters, runs = {"formal": source}, None
    if given == "run id":
        adapters, runs = {"formal": adapter_dir}, {"formal": run_id}
    elif given in ("models", "own"):
        llm.log_model(llama_dir, name="first", registered_model_name="first", adapters=adapters)
        MlflowClient().set_registered_model_alias("first", "best", "1")
        adapters = {"formal": "models:/first@best"}
    with mlflow.start_run() as run:
        info = llm.log_model(llama_dir, name="m", adapters=adapters, adapter_runs=runs)
    params = mlflow.get_logged_model(info.model_id).params
    assert params["llm.adapter.formal.run_id"] == run_id
    assert params["llm.adapter.formal.datasets"].startswith("letters@")
    assert params.get("llm.adapter.formal.source") == (None if given == "run id" else source)
    [dataset] = MlflowClient().get_run(run.info.run_id).inputs.dataset_inputs
    assert dataset.dataset.name == "letters"
    assert llm.load_bundle(info.model_uri).adapters["formal"].endswith("adapters/formal")


def test_an_adapter_alone_is_linked_to_its_base(store, llama_dir, adapter_dir):
    """A version that holds an adapter alone names its base, whose logged model is an input of its run."""
    base = llm.log_model(llama_dir, name="base", registered_model_name="base")
    with mlflow.start_run() as run:
        info = llm.log_model(
            base="models:/base/1", name="a", adapters={"formal": adapter_dir}, registered_model_name="a"
        )
    assert mlflow.get_logged_model(info.model_id).params["llm.base"] == "models:/base/1"
    [linked] = MlflowClient().get_run(run.info.run_id).inputs.model_inputs
    assert linked.model_id == base.model_id


REFUSED = {
    "no run": ({"formal": "runs:/0123456789abcdef0123456789abcdef/a"}, None, r"adapters: 'formal': runs:/0123.*cannot"),
    "no adapter": ({"formal": "models:/base/1"}, None, r"adapters: 'formal': the model has no adapter of that name"),
    "no such version": ({"formal": "models:/base/9"}, None, r"adapters: 'formal': models:/base/9: 'base' .* version 1"),
    "run unknown": ({}, {"formal": "0123456789abcdef0123456789abcdef"}, r"adapter_runs: 'formal': .*not found"),
    "not of the model": ({}, {"other": "RUN"}, r"adapter_runs: 'other' is not an adapter of the model; it has none"),
    "not texts": ({}, {"formal": 3}, r"adapter_runs: .* is not allowed; expected {adapter: run id}"),
}


@pytest.mark.parametrize(("adapters", "runs", "message"), REFUSED.values(), ids=REFUSED)
def test_what_names_no_adapter_is_refused(store, llama_dir, adapter_dir, adapters, runs, message):
    """A URI without an adapter, and a run that does not exist, are refused by the adapter's name."""
    llm.log_model(llama_dir, name="base", registered_model_name="base")
    if runs == {"other": "RUN"}:
        runs = {"other": trained(adapter_dir)}
    with pytest.raises(MlflowException, match=message):
        llm.log_model(llama_dir, name="m", adapters=adapters or None, adapter_runs=runs)


def test_a_store_that_refuses_loses_no_model(store, llama_dir, monkeypatch, caplog):
    """If MLflow does not take the description, the model is logged and a warning says what is missing."""

    def refuse(*args, **kwargs):
        raise MlflowException("no permission")

    monkeypatch.setattr(MlflowClient, "set_logged_model_tags", refuse)
    info = llm.log_model(llama_dir, name="m")
    assert "the model is logged, but MLflow did not take its description: no permission" in caplog.text
    assert llm.load_bundle(info.model_uri).tasks == ("chat", "completions")


LICENCES = {
    "Apache": ("LICENSE", "   Apache License\n   Version 2.0, January 2004\n", "apache-2.0"),
    "MIT": ("LICENSE.txt", "MIT License\n\nCopyright", "mit"),
    "own": ("LICENSE", "\nTiny Community Licence\nAll may", "Tiny Community Licence"),
    "named": ("README.md", "---\nlicense: other\nlicense_name: tiny\n---\n", "tiny"),
    "several": ("README.md", "---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
    "no YAML": ("README.md", "---\nlicense: [mit\n---\n", None),
    "Markdown": ("README.md", "---\nlicense: '`](javascript:x)<script>`'\n---\n", "`](javascript:x)<script>`"),
}


@pytest.mark.parametrize(("file", "text", "found"), LICENCES.values(), ids=LICENCES)
def test_the_licence_is_found(llama_dir, tmp_path, file, text, found):
    """The licence is that of the card, or is known by its text; in the description it is code, without effect."""
    shutil.copytree(llama_dir, tmp_path / "m")
    (tmp_path / "m" / file).write_text(text)
    llm.save_model(tmp_path / "saved", tmp_path / "m")
    flavor = Model.load(str(tmp_path / "saved")).flavors["llm"]
    facts = stored_facts(flavor)
    assert facts.license == found
    shown = registry_pages.description(flavor, facts, "models:/a/1")
    assert f"Licence: `{(found or 'not stated').replace('`', chr(39))}`." in shown


def test_the_example_that_is_stored_runs(store, llama_dir):
    """The stored input example is answered by the logged model, and is stored as a body to serve."""
    info = llm.log_model(llama_dir, name="m")
    model = mlflow.pyfunc.load_model(info.model_uri, model_config={"in_process": True})
    example = Model.load(info.model_uri).load_input_example(info.artifact_path)
    assert model.predict(example)["choices"][0]["message"]["role"] == "assistant"
    file = mlflow.artifacts.download_artifacts(f"{info.artifact_path}/serving_input_example.json")
    assert json.loads(Path(file).read_text())["messages"][0]["content"] == "Say hello."
    llm.close(model)


def test_replies_name_the_version(store, llama_dir, adapter_dir):
    """``model`` of a reply is the registered name and version, also by an alias; else the id of the logged model."""
    info = llm.log_model(llama_dir, name="m", registered_model_name="assistant", adapters={"formal": adapter_dir})
    MlflowClient().set_registered_model_alias("assistant", "best", "1")
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for uri in ("models:/assistant/1", "models:/assistant@best"):
        model = mlflow.pyfunc.load_model(uri, model_config={"in_process": True})
        assert model.predict(asked)["model"] == "assistant/1"
        assert model.predict(asked | {"model": "assistant/1:formal"})["model"] == "assistant/1:formal"
        assert next(iter(model.predict_stream(asked)))["model"] == "assistant/1"
        llm.close(model)
    other = llm.log_model(llama_dir, name="other")
    model = mlflow.pyfunc.load_model(other.model_uri, model_config={"in_process": True})
    assert model.predict(asked)["model"] == other.model_id != info.model_id
    llm.close(model)


@pytest.mark.parametrize("form", ["models:/{model}", "runs:/{run}/assistant"])
def test_a_version_registered_later_is_described(store, llama_dir, form):
    """``mlflow.register_model`` copies tags and description; the lines that serve the model name the version."""
    with mlflow.start_run() as run:
        info = llm.log_model(llama_dir, name="assistant", tags={"team": "a"})
    uri = form.format(model=info.model_id, run=run.info.run_id)
    made = mlflow.register_model(uri, "late", tags={"llm.dtype": "mine"})
    version = MlflowClient().get_model_version("late", made.version)
    logged = MlflowClient().get_logged_model(info.model_id)
    assert version.tags == {k: v for k, v in logged.tags.items() if k.startswith("llm.")} | {"llm.dtype": "mine"}
    assert version.tags["llm.content_hash"] == info.flavors["llm"]["content_hash"]
    assert f"mlflow-llm serve -m models:/late/{made.version}\n" in version.description
    assert info.model_id not in version.description


def test_versions_of_others_and_descriptions_of_users_stay(store, llama_dir, monkeypatch, caplog):
    """A description that was given stays, other flavors' versions get nothing, and a refusal loses no version."""
    client = MlflowClient()
    with mlflow.start_run():
        info = llm.log_model(llama_dir, name="assistant")
        other = mlflow.pyfunc.log_model(name="other", python_model=Shout(), signature=False)
    client.create_registered_model("late")
    given = client.create_model_version("late", f"models:/{info.model_id}", description="mine", model_id=info.model_id)
    assert client.get_model_version("late", given.version).description == "mine"
    plain = mlflow.register_model(f"models:/{other.model_id}", "others")
    assert (plain.tags, plain.description) == ({}, None)

    def refuse(*_, **__):
        raise MlflowException("read-only")

    monkeypatch.setattr(ModelRegistryClient, "set_model_version_tag", refuse)
    made = mlflow.register_model(f"models:/{info.model_id}", "late")
    assert client.get_model_version("late", made.version).tags == {}
    assert f"late/{made.version} is registered, but not described: read-only" in caplog.text


class Shout(mlflow.pyfunc.PythonModel):
    """A model of another flavor."""

    def predict(self, context, model_input):
        return model_input
