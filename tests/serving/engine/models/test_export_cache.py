"""The cache of transformers' exported names: read once, and anew when a source changes."""

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
    """Look up places in one process, which remembers its answers."""
    found: dict[str, Any] = {}
    return [export_cache.kept(reader, found, place) for place in places]


def test_a_second_process_reads_no_source(models: Path, cache: Path) -> None:
    """A second process takes the exports from the cache file, which only its owner can read."""
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
def test_a_changed_source_is_read_again(models: Path, cache: Path, changed: str) -> None:
    """A changed source file or directory is read again."""
    reader = Reader()
    before = ask(reader, models)
    (models / changed).write_text("LlamaModel = 1; another = 2\n")
    os.utime(models / changed, ns=(1, 1))
    assert ask(reader, models) != before
    assert len(reader.read) == 2


def test_other_directories_are_not_cached(models: Path, cache: Path) -> None:
    """Directories other than the package of models are read from source and not cached."""
    reader = Reader()
    ask(reader, models / "llama", models / "llama" / "modeling_llama.py")
    assert len(reader.read) == 2
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"i\x01\x00\x00\x00", bytes(range(64))])
def test_a_foreign_cache_file_is_not_used(models: Path, cache: Path, content: bytes) -> None:
    """A cache file with foreign content is ignored and replaced."""
    reader = Reader()
    ask(reader, models)
    (kept,) = cache.iterdir()
    kept.write_bytes(content)
    assert ask(reader, models)[0] == {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "2"}}}
    ask(reader, models)
    assert len(reader.read) == 2


def test_a_file_that_others_may_write_is_not_used(models: Path, cache: Path) -> None:
    """A cache file that others may write to is ignored."""
    reader = Reader()
    ask(reader, models)
    (kept,) = cache.iterdir()
    kept.chmod(0o666)
    ask(reader, models)
    assert len(reader.read) == 2


def test_without_a_place_to_write_it_works_the_same(models: Path, cache: Path) -> None:
    """The exports are the same if the cache directory cannot be created."""
    cache.parent.write_text("a file is in the way")
    reader = Reader()
    assert ask(reader, models) == [{frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "1"}}}]


def test_a_user_without_a_home_reads_the_sources(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home directory, as in a container that runs as a number, reads the sources."""
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


def test_the_cached_function_exists_in_transformers() -> None:
    """The cached function exists in the installed transformers; were it moved, every start would read all sources again
    unnoticed."""
    assert callable(getattr(importlib.import_module(export_cache.READER), export_cache.READ, None))


def test_no_import_hook_after_the_import_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import hook is installed only while transformers' package is not imported yet, and removed afterwards."""
    finders = list(sys.meta_path)
    with export_cache.used():
        assert sys.meta_path == finders
    monkeypatch.delitem(sys.modules, export_cache.PACKAGE)
    with export_cache.used():
        assert len(sys.meta_path) == len(finders) + 1
        assert export_cache.Finder().find_spec("transformers.utils") is None
    assert sys.meta_path == finders
