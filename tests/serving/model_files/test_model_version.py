"""The identity of a served model."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.model_files.model_version import ModelVersion

HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("uri", "label"),
    [
        ("models:/assistant/7", "assistant/7"),
        ("models:/assistant@champion", "assistant/champion"),
        ("models:/m-0123456789abcdef0123456789abcdef", ""),
        ("runs:/abc/model", ""),
        ("/srv/models/assistant", ""),
    ],
)
def test_a_registered_model_has_a_name_and_a_version(uri: str, label: str) -> None:
    """Others are known by their content alone."""
    model = ModelVersion.of(uri, HASH)
    assert (model.label, model.content_hash) == (label, HASH)
    assert str(model) == f"{label} 0123456789ab".strip()
