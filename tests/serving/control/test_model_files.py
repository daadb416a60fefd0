"""The files of served models in the cache of downloads: held while they are served, found again when they are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.control.model_sources import with_files
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.model_files import downloads


def download(key: str) -> Bundle:
    """Return a bundle whose files are the download ``key``, which no process holds."""

    def fill(part: Path) -> None:
        for name in ("model", "tokenizer"):
            (part / name).mkdir(exist_ok=True)
            (part / name / "file").write_text("x")

    root = downloads.entry(key, fill)
    downloads.keep_only(())
    return Bundle(
        content_hash="a", tasks=("chat",), model_dir=str(root / "model"), tokenizer_dir=str(root / "tokenizer")
    )


@pytest.fixture
def entity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EntityConfig:
    """Return an entity whose model was downloaded, in a cache that may keep nothing."""
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path))
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "0")
    source = ModelSource(uri="models:/m/1", bundle=download("one"))
    return EntityConfig(name="m", entity_name="m", entity_version="1", source=source)


def found(uris: tuple[str, ...], texts: tuple[str, ...] = ()) -> tuple[ResolvedModel, ...]:
    return (ResolvedModel(bundle=download("one"), uri=uris[0]),)


def test_files_are_held_once_found(entity: EntityConfig) -> None:
    """From then on they are not removed, until the reconciler needs them no more."""
    assert with_files(entity, find=found) == entity
    downloads.make_room(0)
    assert Path(entity.model.bundle.model_dir).is_dir()
    downloads.keep_only(())
    downloads.make_room(0)
    assert not Path(entity.model.bundle.model_dir).exists()


def test_removed_files_are_found_again(entity: EntityConfig) -> None:
    """Also those of an adapter in a directory of its own."""
    downloads.make_room(0)
    assert not Path(entity.model.bundle.model_dir).exists()
    assert with_files(entity, find=found) == entity
    assert Path(entity.model.bundle.model_dir).is_dir()
    bundle = msgspec.structs.replace(entity.model.bundle, adapters={"one": "/nowhere"})
    lacking = msgspec.structs.replace(entity, source=msgspec.structs.replace(entity.model, bundle=bundle))
    assert with_files(lacking, find=found).model.bundle.adapters == {}
    downloads.keep_only(())


def test_files_that_vanish_at_once_are_reported(entity: EntityConfig) -> None:
    """No engine is started over files that are gone."""

    def vanishing(uris: tuple[str, ...], texts: tuple[str, ...] = ()) -> tuple[ResolvedModel, ...]:
        (model,) = found(uris, texts)
        shutil.rmtree(Path(model.bundle.model_dir).parent)
        return (model,)

    downloads.make_room(0)
    with pytest.raises(PackagingError, match="models:/m/1: its files were removed from the cache"):
        with_files(entity, find=vanishing)
