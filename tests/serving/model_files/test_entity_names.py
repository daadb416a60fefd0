"""Names that are made for the models that a command line names."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.interface.settings import NAME
from mlflow_llm.serving.model_files.entity_names import label_of


@pytest.mark.parametrize(
    ("uri", "label"),
    [
        ("models:/assistant/3", "assistant-3"),
        ("models:/assistant@champion", "assistant-champion"),
        ("models:/assistant/latest", "assistant-latest"),
        ("models:/My model v1.5/3", "My-model-v1-5-3"),
        ("models:/m-" + "0a" * 16, "m-" + "0a" * 16),
        ("runs:/abc/model", "model"),
        ("/srv/models/SmolLM2-1.7B/", "SmolLM2-1.7B"),
        ("./tiny chat", "tiny-chat"),
        ("org/tiny-chat", "tiny-chat"),
        ("/srv/models/.hidden_", "hidden"),
        ("s3://bucket/models/a", "a"),
        ("/srv/" + "x" * 80, "x" * 63),
        ("/srv/" + "x" * 62 + "-y", "x" * 62),
        ("/", "model"),
        ("/srv/модель", "model"),
        ("models:/модель/3", "3"),
        ("models:/модель@лучшая", "model"),
        ("model_", "model_"),
        ("assistant-3", "assistant-3"),
    ],
)
def test_a_model_gives_a_name_that_the_api_accepts(uri: str, label: str) -> None:
    """It is that of the registered version or alias, or the last part of the path; a name stays as it is."""
    assert label_of(uri) == label
    assert NAME.fullmatch(label)
    assert label_of(label) == label
