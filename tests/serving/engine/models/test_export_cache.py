"""What transformers' models export is read once, and anew when a source changes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlflow_llm.serving.engine.models import export_cache
from mlflow_llm.serving.engine.models.packed import cache_file

Structure = dict[frozenset[str], dict[str, set[str]]]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "transformers" / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "llama" / "modeling_llama.py").write_text("LlamaModel = 1\n")
    (folder.parent / "utils").mkdir()
    (folder.parent / "utils" / "import_utils.py").write_text("")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / export_cache.CACHE_PART


class Reader:
    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, place: Any) -> Structure:
        self.read.append(os.fspath(place))
        return {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", str(len(self.read))}}}


def ask(reader: Reader, *places: Path) -> list[Structure]:
    """By one process: what it asks for a second time it has."""
    found: dict[str, Any] = {}
    return [export_cache.kept(reader, found, place) for place in places]


def test_a_second_process_reads_no_source(models: Path, cache: Path) -> None:
    reader = Reader()
    first = ask(reader, models, models / "__init__.py")
    assert reader.read == [str(models)]
    assert first[0] == first[1] == {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "1"}}}
    assert ask(reader, models / "__init__.py") == first[:1]
    assert len(reader.read) == 1
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("changed", ["llama/modeling_llama.py", "llama/modeling_new.py", "../utils/import_utils.py"])
def test_a_source_that_changed_is_read(models: Path, cache: Path, changed: str) -> None:
    reader = Reader()
    before = ask(reader, models)
    (models / changed).write_text("LlamaModel = 1; another = 2\n")
    os.utime(models / changed, ns=(1, 1))
    assert ask(reader, models) != before
    assert len(reader.read) == 2


def test_other_directories_are_read(models: Path, cache: Path) -> None:
    reader = Reader()
    ask(reader, models / "llama", models / "llama" / "modeling_llama.py")
    assert len(reader.read) == 2
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"i\x01\x00\x00\x00", bytes(range(64))])
def test_a_file_that_is_none_of_ours_is_not_used(models: Path, cache: Path, content: bytes) -> None:
    reader = Reader()
    ask(reader, models)
    (kept,) = cache.iterdir()
    kept.write_bytes(content)
    assert ask(reader, models)[0] == {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "2"}}}
    ask(reader, models)
    assert len(reader.read) == 2


def test_a_file_that_others_may_write_is_not_used(models: Path, cache: Path) -> None:
    reader = Reader()
    ask(reader, models)
    (kept,) = cache.iterdir()
    kept.chmod(0o666)
    ask(reader, models)
    assert len(reader.read) == 2


def test_without_a_place_to_write_it_works_the_same(models: Path, cache: Path) -> None:
    cache.parent.write_text("a file is in the way")
    reader = Reader()
    assert ask(reader, models) == [{frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "1"}}}]


def test_a_user_without_a_home_reads_the_sources(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number."""
    monkeypatch.delenv("MLFLOW_LLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError):
        Path("~").expanduser()
    reader = Reader()
    assert ask(reader, models) == [{frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "1"}}}]
    assert cache_file.open_packed("a model") is None
    with pytest.raises(OSError, match="MLFLOW_LLM_CACHE"):
        cache_file.write_packed("a model", {}, {}, 1 << 20)


def test_the_function_that_reads_sources_is_where_it_is_looked_for() -> None:
    """Where a release of transformers has moved it, every start reads all sources again, and nothing else says so."""
    assert callable(getattr(importlib.import_module(export_cache.READER), export_cache.READ, None))


def test_nothing_is_put_before_an_import_that_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    with export_cache.used():
        assert sys.meta_path == finders
    monkeypatch.delitem(sys.modules, export_cache.PACKAGE)
    with export_cache.used():
        assert len(sys.meta_path) == len(finders) + 1
        assert export_cache.Finder().find_spec("transformers.utils") is None
    assert sys.meta_path == finders
