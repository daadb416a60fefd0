"""``models:/`` URIs taken apart and put together."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.model_files.model_uri import RegisteredModel, by_version, in_store, is_path, parse


@pytest.mark.parametrize(
    ("uri", "model"),
    [
        ("models:/assistant/3", RegisteredModel(name="assistant", version="3")),
        ("models:/assistant/latest", RegisteredModel(name="assistant", version="latest")),
        ("models:/assistant@champion", RegisteredModel(name="assistant", alias="champion")),
        ("models:/main.chat.assistant@a-b", RegisteredModel(name="main.chat.assistant", alias="a-b")),
        ("models:/assistant", RegisteredModel(name="assistant")),
        ("models:/me@example/3", RegisteredModel(name="me@example", version="3")),
        ("models:/me@example@champion", RegisteredModel(name="me@example", alias="champion")),
    ],
)
def test_a_registered_model_is_parsed_and_written_back(uri: str, model: RegisteredModel) -> None:
    """A URI is parsed by MLflow's rule, that the last at sign begins the alias, and formatted back unchanged."""
    assert parse(uri) == model
    assert model.uri == uri


@pytest.mark.parametrize(
    "uri",
    ["models:/m-" + "0" * 32, "models:/", "models:/a/b/c", "models:/a@", "models:/@b", "runs:/1/model", "/a/b", "a@b"],
)
def test_uris_without_a_registered_model(uri: str) -> None:
    """Ids of logged models, malformed URIs, other schemes and paths are not registered models."""
    assert parse(uri) is None


@pytest.mark.parametrize(
    ("version", "uri"),
    [("3", "models:/a/3"), ("@b", "models:/a@b"), ("b", "models:/a@b"), ("latest", "models:/a/latest")],
)
def test_a_served_entity_names_a_version_or_an_alias(version: str, uri: str) -> None:
    """``latest`` counts as a version, and an alias may be given without its at sign."""
    assert by_version("a", version).uri == uri


def test_paths_and_stores_are_reported_apart() -> None:
    """A store's URI, a local path and anything else are told apart."""
    asked = ["models:/a/1", "runs:/1/a", "./a", "/srv/a:b", "s3://bucket/a"]
    assert [in_store(uri) for uri in asked] == [True, True, False, False, False]
    assert [is_path(uri) for uri in asked] == [False, False, True, True, False]
