"""Resolution of model URIs: pinned to a version, or an error that names the alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.utils.models import get_model_name_and_version
from stores import own_registry, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import model_registry
from mlflow_llm.serving.interface.errors import ModelNotFound


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Register ``assistant`` with versions 1 to 7, an alias and a stage, and ``empty`` without a version."""
    with own_registry(tmp_path_factory.mktemp("registry")) as uri:
        client = MlflowClient()
        client.create_registered_model("assistant")
        client.create_registered_model("empty")
        for _ in range(7):
            client.create_model_version("assistant", source="/nowhere")
        client.set_registered_model_alias("assistant", "champion", "2")
        for version in ("3", "5"):
            with pytest.warns(FutureWarning, match="deprecation of model registry stages"):
                client.transition_model_version_stage("assistant", version, "Production")
        yield uri


@pytest.mark.parametrize(
    ("uri", "version"),
    [
        ("models:/assistant/3", "3"),
        ("models:/assistant@champion", "2"),
        ("models:/assistant/latest", "7"),
        ("models:/assistant/Latest", "7"),
        ("models:/assistant/Production", "5"),
        ("models:/assistant/production", "5"),
    ],
)
def test_a_uri_is_fixed_to_a_version(store: str, uri: str, version: str) -> None:
    """Versions, aliases, ``latest`` and the latest version of a stage are resolved as MLflow does."""
    assert model_registry.pinned(uri) == f"models:/assistant/{version}"
    name, found = get_model_name_and_version(MlflowClient(), uri)
    assert (name, str(found)) == ("assistant", version)


@pytest.mark.parametrize(
    ("uri", "reported"),
    [
        ("models:/asistant/3", "no model 'asistant' is registered in {store}; did you mean assistant?"),
        ("models:/zebra@x", "no model 'zebra' is registered in {store}; there are assistant, empty"),
        ("models:/empty/1", "'empty' in {store} has no version yet; log one with registered_model_name='empty'"),
        (
            "models:/assistant/9",
            "'assistant' in {store} has no version '9'; it has versions 7, 6, 5, 4, 3 and 2 more, and the aliases"
            " @champion (2)",
        ),
        ("models:/assistant/Staging", "'assistant' in {store} has no version in a stage 'Staging'; it has versions 7"),
        ("models:/assistant@chmpion", "'assistant' in {store} has no alias 'chmpion'; it has versions 7, 6"),
        ("models:/assistant", "'assistant' in {store} needs a version or an alias; it has versions 7, 6"),
    ],
)
def test_a_missing_model_is_reported_with_alternatives(store: str, uri: str, reported: str) -> None:
    """A missing model is MLflow's not-found error with the store and the nearest names, versions and aliases."""
    with pytest.raises(ModelNotFound) as caught:
        model_registry.pinned(uri)
    assert str(caught.value).startswith(f"{uri}: {reported.format(store=store)}")
    with pytest.raises(MlflowException) as public:
        llm.load_model(uri)
    assert public.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert public.value.message == str(caught.value)


@pytest.mark.parametrize("uri", ["models:/assistant/1", "models:/assistant@champion", "runs:/abc/model"])
def test_reading_makes_no_store(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If MLflow's default store does not exist, the error says so and no store is created."""
    monkeypatch.chdir(tmp_path)
    with own_stores(f"sqlite:///{tmp_path / 'mlflow.db'}"):
        with pytest.raises(MlflowException, match=r"there is no MLflow store at sqlite:///.*MLFLOW_TRACKING_URI"):
            llm.load_model(uri)
        assert mlflow.get_tracking_uri().startswith("sqlite:")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_run_names_the_store(store: str) -> None:
    """An unknown run is reported with the store that was asked."""
    with pytest.raises(
        MlflowException, match=r"runs:/abc/model cannot be fetched: .*looked for in sqlite:///"
    ) as caught:
        llm.load_model("runs:/abc/model")
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_any_error_of_a_client_is_reported(store: str) -> None:
    """Any error of MLflow's client for a URI scheme is reported, here a bare ValueError without a connection."""
    with pytest.raises(MlflowException, match=r"http://127\.0\.0\.1:1/x cannot be fetched: ") as caught:
        llm.load_model("http://127.0.0.1:1/x")
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_a_folder_to_download_to_is_made(llama_dir: Path, tmp_path: Path) -> None:
    """A ``dst_path`` that does not exist is created."""
    llm.save_model(tmp_path / "saved", llama_dir)
    with llm.load_model(str(tmp_path / "saved"), dst_path=str(tmp_path / "new" / "folder")):
        assert list((tmp_path / "new" / "folder").rglob("MLmodel"))
