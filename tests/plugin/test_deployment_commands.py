"""The whole life of a deployment of a registered model, as the commands of ``mlflow deployments``; and in Python, as
that of an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner
from mlflow.deployments import get_deploy_client
from mlflow.deployments.cli import commands
from stores import own_registry, own_stores
from stub_deployments import refused

from mlflow_llm.flavors import llm

ASKED = {"messages": [{"role": "user", "content": w} for w in ("Hi", "Ho", "Hu")], "stop": ["~~", "||", "@@"]}
ASKED |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
OPTIONS = ("-C", "workers=1", "-C", "max_model_len=128", "-C", "idle_timeout=0.5")


@pytest.fixture
def registered(place: Path, saved_model: Path, second_model: Path) -> Iterator[Any]:
    """Register two versions of ``assistant``, the first of them as ``champion``."""
    with own_registry(place):
        for model in (saved_model, second_model):
            with mlflow.start_run():
                llm.log_model(model.parent / "hf", name="model", registered_model_name="assistant")
        registry = mlflow.MlflowClient()
        registry.set_registered_model_alias("assistant", "champion", "1")
        yield registry


def command(*words: str) -> str:
    done = CliRunner().invoke(commands, [words[0], "-t", "llm", *words[1:]])
    assert done.exit_code == 0, (words, done.output, done.exception)
    return str(done.stdout)


def asked(file: Path) -> str:
    """Return the answer of ``predict`` to the request in ``file``."""
    reply = json.loads(command("predict", "--name", "assistant", "-I", str(file)))
    assert reply["usage"]["completion_tokens"] == 8
    return str(reply["choices"][0]["message"]["content"])


def test_the_life_of_a_deployment_as_commands(registered: Any, place: Path) -> None:
    """A deployment is created from an alias, listed, queried, updated to the moved alias and deleted by commands."""
    file = place / "request.json"
    file.write_text(json.dumps(ASKED))
    assert "assistant is created" in command(
        "create", "--name", "assistant", "-m", "models:/assistant@champion", *OPTIONS
    )
    try:
        assert "'assistant'" in command("list")
        shown = command("get", "--name", "assistant").splitlines()
        assert {"status: RUNNING", "model_uri: models:/assistant@champion", "flavor: llm"} <= set(shown)
        first = asked(file)
        registered.set_registered_model_alias("assistant", "champion", "2")
        assert asked(file) == first
        assert "assistant is updated" in command("update", "--name", "assistant")
        second = asked(file)
        assert second != first
        assert {"status: RUNNING", "model_uri: models:/assistant@champion"} <= set(
            command("get", "--name", "assistant").splitlines()
        )
        refuse_others(place)
        assert asked(file) == second
    finally:
        command("delete", "--name", "assistant")
    assert command("list").splitlines()[-1] == "[]"


def refuse_others(place: Path) -> None:
    """Check that unknown models, and a registry that is not the server's, are refused."""
    update = get_deploy_client("llm").update_deployment
    refused(
        "RESOURCE_DOES_NOT_EXIST",
        "has no alias .nobody.; it has versions 2, 1, and the aliases @champion",
        update,
        "assistant",
        "models:/assistant@nobody",
    )
    refused(
        "RESOURCE_DOES_NOT_EXIST",
        "has no version .9.; it has versions 2, 1",
        update,
        "assistant",
        "models:/assistant/9",
    )
    refused(
        "RESOURCE_DOES_NOT_EXIST",
        "no model .other. is registered in .*; there are assistant",
        update,
        "assistant",
        "models:/other/1",
    )
    own = mlflow.get_tracking_uri()
    with own_stores(f"sqlite:///{place}/other.db"):
        both = f"from {own}, not from sqlite:///{place}/other.db"
        refused("INVALID_PARAMETER_VALUE", f"tracking_uri: .*{both}", update, "assistant")
        assert not (place / "other.db").exists()


def test_the_life_of_an_endpoint(place: Path, saved_model: Path, second_model: Path) -> None:
    """MLflow's methods for endpoints do what those for deployments do."""
    client = get_deploy_client("llm")
    refused("INVALID_PARAMETER_VALUE", "expected model_uri", client.create_endpoint, "helper", {"workers": 1})
    config = {"workers": 1, "max_model_len": 128, "idle_timeout": 0.5, "prefix_caching": False}
    made = client.create_endpoint("helper", {"model_uri": str(saved_model), **config})
    try:
        assert (made["name"], made["status"], made["config"]) == ("helper", "RUNNING", config)
        assert client.list_endpoints() == [made] == [client.get_endpoint("helper")]
        updated = client.update_endpoint("helper", {"model_uri": str(second_model), "scale_to_zero_enabled": True})
        assert updated == made | {
            "model_uri": str(second_model),
            "config": config | {"scale_to_zero_enabled": True},
        }
        assert client.predict(endpoint="helper", inputs=ASKED)["usage"]["completion_tokens"] == 8
    finally:
        client.delete_endpoint("helper")
    assert client.list_endpoints() == []
    refused("RESOURCE_DOES_NOT_EXIST", "no deployment is called 'helper'", client.get_endpoint, "helper")
