"""Names of models on the command line, and the model that is taken for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_llm.serving.cli.model_names import located, named_version
from mlflow_llm.serving.cli.model_options import named_models


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("assistant", "models:/assistant/latest"),
        ("assistant/3", "models:/assistant/3"),
        ("assistant@champion", "models:/assistant@champion"),
        ("models:/assistant", "models:/assistant/latest"),
        ("models:/assistant/3", "models:/assistant/3"),
        ("models:/assistant@champion", "models:/assistant@champion"),
        ("models:/m-0123456789abcdef0123456789abcdef", "models:/m-0123456789abcdef0123456789abcdef"),
        ("runs:/abc/model", "runs:/abc/model"),
        ("Org/model-2.5", "Org/model-2.5"),
        ("/no/where", "/no/where"),
        ("./assistant", "./assistant"),
        ("model.gguf", "model.gguf"),
    ],
)
def test_what_a_name_stands_for(given: str, uri: str) -> None:
    """A plain name is a registered model, with its latest version unless it names one; other forms stay as they are."""
    assert located(given) == uri


def test_a_model_here_comes_before_a_registered_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's directory is taken before a registered model of the same name, and the line says how to get that."""
    (tmp_path / "assistant").mkdir()
    assert located("assistant") == "models:/assistant/latest"  # a folder of something else
    (tmp_path / "assistant" / "config.json").write_text("{}")
    capsys.readouterr()
    assert located("assistant") == "assistant"
    said = capsys.readouterr().err
    assert f"assistant is a model here, in {tmp_path}/assistant" in said
    assert "models:/assistant" in said


def test_serve_finds_a_registered_model(capsys: pytest.CaptureFixture[str]) -> None:
    """``serve -m assistant`` serves the registered model under its name, and under another with ``=``."""
    assert named_models(("assistant",), None) == {"assistant": "models:/assistant/latest"}
    assert named_models(("assistant@champion=best",), None) == {"best": "models:/assistant@champion"}
    assert "no model's directory or file here; looking for models:/assistant/latest" in capsys.readouterr().err


def test_the_version_that_was_taken_is_said() -> None:
    """The line names the version for an alias or the latest, and is left out where the version was given."""
    assert named_version("models:/a/latest", "models:/a/3") == "models:/a/latest is models:/a/3"
    assert named_version("models:/a/3", "models:/a/3") is None
    assert named_version("/some/where", "") is None
