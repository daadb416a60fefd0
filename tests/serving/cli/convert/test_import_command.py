"""``mlflow-llm import ollama`` and ``transformers``: a model is logged and named, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner, Result
from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Provide a store, a directory with a tiny model, and a Modelfile of that."""
    tiny_llama().save_pretrained(tmp_path / "tiny")
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path / "tiny")
    (tmp_path / "Modelfile").write_text("FROM tiny\nTEMPLATE {{ .Prompt }}>\nPARAMETER seed 3\nPARAMETER num_gpu 1\n")
    with own_stores(empty_store(tmp_path)):
        yield tmp_path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["import", *map(str, words)])


def test_a_modelfile_is_registered(place: Path) -> None:
    """The URI of the logged model is all of standard output; the version has the Modelfile's parameters."""
    done = run("ollama", place / "Modelfile", "--register", "mario")
    assert done.exit_code == 0, done.output
    [uri] = done.stdout.splitlines()
    assert uri == f"models:/{mlflow.models.get_model_info('models:/mario/1').model_id}"
    assert "version 1\n" in done.stderr
    bundle = llm.load_bundle(uri)
    assert sorted(bundle.chat_templates) == ["default", "model"]
    assert mlflow.models.get_model_info(uri).flavors["llm"]["request_defaults"] == {"seed": 3}


def test_a_template_can_be_named(place: Path) -> None:
    """--chat-template takes the model's own, or a file, in place of one that cannot be converted."""
    (place / "Modelfile").write_text("FROM tiny\nTEMPLATE {{ len .Messages }}\n")
    refused = run("ollama", place / "Modelfile")
    assert refused.exit_code == 1
    assert refused.output.splitlines()[-1].startswith("Error: line 2: TEMPLATE: line 1 of the template: ")
    (place / "own.jinja").write_text(TEMPLATE + "own")
    for given, ending in (("model", TEMPLATE), (str(place / "own.jinja"), TEMPLATE + "own")):
        done = run("ollama", place / "Modelfile", "--chat-template", given)
        assert done.exit_code == 0, done.output
        assert Path(llm.load_bundle(done.stdout.strip()).chat_templates["default"]).read_text() == ending


def test_a_model_of_transformers_is_logged(place: Path) -> None:
    """A saved model of mlflow.transformers is logged; one of another flavor is refused in one line."""
    parts = {"model": tiny_llama(), "tokenizer": byte_tokenizer(chat_template=TEMPLATE)}
    mlflow.transformers.save_model(parts, str(place / "old"), task="text-generation", pip_requirements=["mlflow"])
    done = run("transformers", place / "old", "--name", "new")
    assert done.exit_code == 0, done.output
    assert llm.load_bundle(done.stdout.strip()).tasks == ("completions", "chat")
    refused = run("transformers", place / "tiny")
    assert refused.exit_code == 1
    assert "holds no MLmodel" in refused.output
