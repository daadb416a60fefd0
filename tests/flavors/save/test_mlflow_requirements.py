"""MLflow's functions that change the environment of a logged model leave one of this flavor loadable."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest
import yaml
from mlflow.exceptions import MlflowException
from mlflow.models.wheeled_model import WheeledModel

from mlflow_llm.flavors import llm


@pytest.fixture
def logged(store, llama_dir):
    """Return a logged model, which is models:/assistant/1."""
    return llm.log_model(llama_dir, name="m", registered_model_name="assistant", pip_requirements=["six==1.16.0"])


def root_of(uri: str) -> Path:
    return Path(mlflow.artifacts.download_artifacts(uri))


def lines(uri: str) -> list[str]:
    return (root_of(uri) / "requirements.txt").read_text().splitlines()


def test_packages_are_added_and_removed(logged) -> None:
    """The wheel's folder and this package stay, both files say the same, and the model loads, fully verified."""
    uri = logged.model_uri
    (option,) = [line for line in lines(uri) if line.startswith("--find-links")]
    own = [line for line in lines(uri) if line.startswith("mlflow-llm")]
    mlflow.models.update_model_requirements(uri, "add", ["boto3", "Six>=1.17"])
    assert lines(uri)[0] == option
    assert set(own) <= set(lines(uri))
    assert [line for line in lines(uri) if "ix" in line] == ["Six>=1.17"]
    assert "boto3" in lines(uri)
    mlflow.models.update_model_requirements(uri, "remove", ["boto3"])
    assert "boto3" not in lines(uri)
    conda = yaml.safe_load((root_of(uri) / "conda.yaml").read_text())
    assert [part["pip"] for part in conda["dependencies"] if isinstance(part, dict)] == [lines(uri)]
    llm.load_bundle(uri, verify="full")
    mlflow.pyfunc.load_model(uri)


@pytest.mark.parametrize(
    ("operation", "line", "words"),
    [
        ("add", "evil @ https://example.org/evil.whl", "is not allowed; expected a package's name and version"),
        ("add", "--index-url https://example.org", "is not a package's name and version"),
        ("remove", "mlflow_llm", "mlflow-llm cannot be removed"),
        ("replace", "six", "operation: 'replace' is not allowed; expected add or remove"),
    ],
)
def test_what_would_break_the_model_is_refused(logged, operation, line, words) -> None:
    """Nothing is changed then."""
    before = {path: path.read_bytes() for path in root_of(logged.model_uri).rglob("*") if path.is_file()}
    with pytest.raises(MlflowException, match=words):
        mlflow.models.update_model_requirements(logged.model_uri, operation, [line])
    assert {path: path.read_bytes() for path in root_of(logged.model_uri).rglob("*") if path.is_file()} == before


def test_other_models_are_mlflows(store) -> None:
    """A model of another flavor is updated by MLflow itself, and so is what MLflow refuses."""

    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input: list[str]) -> list[str]:
            return model_input

    info = mlflow.pyfunc.log_model(name="echo", python_model=Echo(), pip_requirements=["six"])
    mlflow.models.update_model_requirements(info.model_uri, "add", ["boto3"])
    assert "boto3" in lines(info.model_uri)
    with pytest.raises(MlflowException, match="scheme are not supported"):
        mlflow.models.update_model_requirements("models:/assistant/1", "add", ["boto3"])


def test_libraries_are_added(logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version with all wheels loads, though MLflow has written its environment anew."""

    def download(pip_requirements_path: str, dst_path: str, extra_envs: object = None) -> None:
        Path(dst_path, "six-1.16.0-py2.py3-none-any.whl").write_bytes(b"a wheel")

    monkeypatch.setattr(WheeledModel, "_download_wheels", staticmethod(download))
    with mlflow.start_run():
        mlflow.models.add_libraries_to_model("models:/assistant/1")
    assert lines("models:/assistant/2") == ["wheels/six-1.16.0-py2.py3-none-any.whl"]
    llm.load_bundle("models:/assistant/2", verify="full")
    mlflow.pyfunc.load_model("models:/assistant/2")


def test_an_environment_that_nobody_announced_is_refused(logged) -> None:
    """A line added by hand is still found."""
    root = root_of(logged.model_uri)
    with (root / "requirements.txt").open("a") as file:
        file.write("evil\n")
    assert json.loads((root / "manifest.json").read_text())["environment"]
    with pytest.raises(MlflowException, match=r"requirements\.txt has .* bytes"):
        llm.load_bundle(logged.model_uri)


def test_a_name_with_an_at(store, llama_dir, tmp_path: Path) -> None:
    """A registered model's name may have an @: by version, by alias, and to a folder of the caller's."""
    llm.log_model(llama_dir, name="m", registered_model_name="x@y")
    mlflow.MlflowClient().set_registered_model_alias("x@y", "champ", "1")
    for uri in ("models:/x@y/1", "models:/x@y@champ", "models:/x@y/latest"):
        llm.load_bundle(uri)
    with llm.load_model("models:/x@y@champ", dst_path=str(tmp_path / "new")):
        assert (tmp_path / "new" / "MLmodel").is_file()


def test_the_old_name_of_name(store, llama_dir, caplog: pytest.LogCaptureFixture) -> None:
    """``artifact_path`` is accepted with MLflow's own warning; both names at once are refused."""
    info = llm.log_model(llama_dir, artifact_path="m")
    assert info.name == "m"
    with pytest.raises(MlflowException, match="Both `artifact_path` \\(deprecated\\) and `name`"):
        llm.log_model(llama_dir, name="m", artifact_path="m")
