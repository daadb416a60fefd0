"""GGUF files of architectures that are not read."""

from __future__ import annotations

import pytest

from mlflow_llm.flavors.llm.save.gguf.families import FAMILIES, model_config
from mlflow_llm.flavors.llm.save.gguf.header import Header
from mlflow_llm.flavors.llm.save.gguf.unread import NOT_SERVED, SERVED
from mlflow_llm.serving.interface.errors import PackagingError


@pytest.mark.parametrize(
    ("architecture", "reported"),
    [
        ("gpt-oss", "gpt-oss is served, but not from a GGUF file; log the checkpoint that the file was made of"),
        ("falcon", "Falcon is served in no form: transformers offers no way .*; log a model of another family"),
        ("mamba", "Mamba is served in no form: it keeps a recurrent state"),
        ("new", "expected one of gemma2, .*, starcoder2; log the checkpoint"),
    ],
)
def test_a_refusal_says_what_to_use_instead(architecture: str, reported: str) -> None:
    """The family, the reason, and whether its checkpoint can be logged."""
    header = Header(file="x.gguf", values={"general.architecture": architecture}, tensors={})
    with pytest.raises(PackagingError, match=f"general.architecture = '?{architecture}'? is not supported.*{reported}"):
        model_config(header)


def test_no_architecture_is_in_two_tables() -> None:
    """An architecture is read, or served as a checkpoint only, or not served."""
    assert not SERVED.keys() & NOT_SERVED.keys()
    assert not (SERVED.keys() | NOT_SERVED.keys()) & FAMILIES.keys()
