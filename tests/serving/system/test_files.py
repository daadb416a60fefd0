"""The cache directory, and atomic replacement of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlflow_llm.serving.engine.models.packed import cache_file
from mlflow_llm.serving.model_files import cached_copies
from mlflow_llm.serving.system.files import cache_dir, replace_file, replacing


@pytest.mark.parametrize(
    ("given", "user", "expected"),
    [
        ("/a/b", "/c", "/a/b/x"),
        ("", "/c", "/c/mlflow-llm/x"),
        ("", "", "/home/me/.cache/mlflow-llm/x"),
        ("", "c", "/home/me/.cache/mlflow-llm/x"),
    ],
)
def test_the_cache_is_where_its_variables_say(
    monkeypatch: pytest.MonkeyPatch, given: str, user: str, expected: str
) -> None:
    """The cache is at the package's variable, XDG's or below the home folder; empty ones, and XDG's relative ones, are
    ignored.
    """
    for name, value in {"MLFLOW_LLM_CACHE": given, "XDG_CACHE_HOME": user, "HOME": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    assert cache_dir("x") == Path(expected)


def test_parts_of_the_cache_have_places_of_their_own() -> None:
    """Logged models and packed weights have separate directories in the cache."""
    assert cached_copies.PLACE != cache_file.PLACE


def test_a_file_is_replaced_whole_and_is_its_owners(tmp_path: Path) -> None:
    """Replacing a file leaves open readers the old content, makes it private and leaves no temporary file."""
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    with path.open("rb") as old:
        replace_file(path, b"three")
        assert (old.read(), path.read_bytes()) == (b"one", b"three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    """A failed replacement leaves the old file and nothing beside it."""
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == ["a"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """If the writer raises the old file stays, and a killed writer's temporary file does no harm."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    (tmp_path / "a.draft").symlink_to(tmp_path / "elsewhere")

    def interrupted() -> None:
        with replacing(path, suffix=".draft") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (os.listdir(tmp_path), path.read_bytes()) == (["a"], b"old")
    with replacing(path, suffix=".draft", mode=0o640) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (os.listdir(tmp_path), path.read_bytes()) == (["a"], b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
