"""The content of an adapter: its hash, and its files in the cache of a host that has only the hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.model_files import downloads
from mlflow_llm.serving.model_files.adapter_contents import (
    CHUNK_BYTES,
    CONFIG,
    WEIGHTS,
    AdapterContent,
    content_of,
    fetch,
    local_path,
    pieces,
    read_piece,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def adapter(place: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    place.mkdir(parents=True)
    (place / CONFIG).write_text(config)
    (place / WEIGHTS).write_bytes(weights)
    return place


def stored(content: AdapterContent, place: Path) -> list[bytes]:
    """Return the parts that a store has of the content in ``place``."""
    return [content.described, *(read_piece(*piece) for piece in pieces(content, place))]


def reader(parts: list[bytes]) -> Callable[[int], bytes | None]:
    return lambda number: parts[number] if number < len(parts) else None


def test_the_hash_is_of_the_files_alone(tmp_path: Path) -> None:
    """Equal files have one hash in any directory, whatever is beside them; other weights or another config another."""
    one, same = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    (same / "README.md").write_text("trained by somebody")
    assert content_of(one).content_hash == content_of(same).content_hash
    others = [adapter(tmp_path / "c", weights=b"other"), adapter(tmp_path / "d", config='{"r": 8}')]
    assert len({content_of(place).content_hash for place in (one, *others)}) == 3


@pytest.mark.parametrize("size", [0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_a_fetched_content_has_the_files(tmp_path: Path, size: int) -> None:
    """The cache has the files byte for byte, once, and a second fetch reads nothing."""
    place = adapter(tmp_path / "a", weights=os.urandom(size))
    content = content_of(place)
    assert local_path(content.content_hash) == ""
    path = fetch(content.content_hash, reader(stored(content, place)), "an adapter")
    assert content_of(path) == content
    assert (Path(path) / WEIGHTS).read_bytes() == (place / WEIGHTS).read_bytes()
    assert local_path(content.content_hash) == path == fetch(content.content_hash, reader([]), "an adapter")
    assert downloads.label_of(Path(path).name) == "an adapter"


def test_what_is_not_the_content_never_enters_the_cache(tmp_path: Path) -> None:
    """Missing, cut and changed parts are refused, and nothing is left that looks like the adapter."""
    place = adapter(tmp_path / "a", weights=os.urandom(CHUNK_BYTES + 9))
    content = content_of(place)
    whole = stored(content, place)
    other = content_of(adapter(tmp_path / "b")).described
    changed = [*whole[:-1], bytes(len(whole[-1]))]
    for parts in ([], whole[:1], whole[:-1], changed, [other, *whole[1:]]):
        with pytest.raises(PackagingError, match=r"no such content|damaged|not whole"):
            fetch(content.content_hash, reader(parts), "an adapter")
        assert local_path(content.content_hash) == ""
    assert content_of(fetch(content.content_hash, reader(whole), "an adapter")) == content
    with pytest.raises(PackagingError, match="not the hash"):
        fetch("../../etc", reader(whole), "an adapter")


def test_a_killed_fetch_is_begun_again(tmp_path: Path, cache: Path) -> None:
    """Files that a killed fetch has left do not get into those of the next one."""
    place = adapter(tmp_path / "a")
    content = content_of(place)
    left = cache / "downloads" / f"adapter-{content.content_hash}.part"
    left.mkdir(parents=True, mode=0o700)
    for folder in (cache, cache / "downloads"):
        folder.chmod(0o700)
    (left / WEIGHTS).write_bytes(b"half")
    (left / "other").write_bytes(b"")
    path = Path(fetch(content.content_hash, reader(stored(content, place)), "an adapter"))
    assert sorted(file.name for file in path.iterdir()) == [CONFIG, WEIGHTS]
    assert content_of(path) == content


def test_files_that_change_or_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that change while they are read, are missing, too large or no regular files have no content."""
    place = adapter(tmp_path / "a", weights=b"0123456789")
    with pytest.raises(PackagingError, match="12 bytes; 11 are allowed"):
        content_of(place, maximum=11)
    assert content_of(place, maximum=12).num_bytes == 12
    digest = hashlib.file_digest

    def change(*given: Any) -> Any:
        found = digest(*given)
        (place / CONFIG).write_text("{ }")
        return found

    monkeypatch.setattr(hashlib, "file_digest", change)
    with pytest.raises(PackagingError, match="changed while they were read"):
        content_of(place)
    monkeypatch.undo()
    (place / WEIGHTS).unlink()
    with pytest.raises(PackagingError, match="cannot be read"):
        content_of(place)
    os.mkfifo(place / WEIGHTS)
    with pytest.raises(PackagingError, match="is not a file"):
        content_of(place)
