"""The files of saved and logged models have the permissions that the process's umask gives."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from flavor_models import add_lora, byte_tokenizer, tiny_llama

from mlflow_llm.flavors import llm


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) & 0o444 for path in root.rglob("*") if path.is_file()}


def test_a_saved_model(tmp_path: Path, umask: int) -> None:
    """Weights and adapters, which safetensors writes for their owner alone, are read by whom the umask allows."""
    llm.save_model(tmp_path / "m", model=add_lora(tiny_llama()), tokenizer=byte_tokenizer())
    assert modes(tmp_path / "m") == {0o444 & ~umask}


def test_a_logged_model(store: str, tmp_path: Path) -> None:
    """A directory whose weights only their owner reads is logged readable, and stays as it was."""
    source = tmp_path / "source"
    tiny_llama().save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    (source / "model.safetensors").chmod(0o600)
    info = llm.log_model(source, name="m")
    assert modes(Path(mlflow.artifacts.download_artifacts(info.model_uri))) == {0o444}
    assert stat.S_IMODE((source / "model.safetensors").stat().st_mode) == 0o600


def test_a_linked_file(tmp_path: Path) -> None:
    """``link_files=True`` shares the caller's file, and so its permissions, which are not changed."""
    source = tmp_path / "source"
    tiny_llama().save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    (source / "model.safetensors").chmod(0o600)
    llm.save_model(tmp_path / "m", model=source, link_files=True)
    weights = (tmp_path / "m/model/model.safetensors").stat()
    assert weights.st_ino == (source / "model.safetensors").stat().st_ino
    assert stat.S_IMODE(weights.st_mode) == 0o600
