"""The cache as ``mlflow-llm models`` lists it, and the commands that remove from it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.model_files import cached_copies, downloads
from mlflow_llm.serving.system.files import CACHE_VARIABLE

OLD = time.time() - 90 * 86_400


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache with a download, a copy and packed weights, of 1000, 500 and 200 bytes."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def fill(part: Path) -> None:
        (part / "weights").write_bytes(bytes(1000))

    downloads.entry("d" * 20, fill, "models:/assistant/3")
    downloads.keep_only([])  # this process holds it no longer
    copy = tmp_path / "models" / "smol-0123456789abcdef"
    copy.mkdir(parents=True)
    (copy / "weights").write_bytes(bytes(500))
    packed = tmp_path / "packed"
    packed.mkdir(mode=0o700)
    (packed / ("a" * 40)).write_bytes(bytes(200))
    for path in (copy, packed / ("a" * 40)):
        os.utime(path, (OLD, OLD))
    return tmp_path


def command(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def listed() -> list[dict[str, Any]]:
    return json.loads(command("models", "--no-registry", "--json").stdout)["cached"]


def test_models_lists_the_cache() -> None:
    """Downloads are listed by what they were fetched as, copies by their source, packed weights by their key."""
    found = {one["kind"]: (one["model"], one["size"]) for one in listed()}
    assert found == {"download": ("models:/assistant/3", 1000), "copy": ("smol", 500), "packed": ("", 200)}
    shown = command("models", "--no-registry").stdout
    assert "cache (1.7 kB on the disk)" in shown
    assert "90 days ago" in shown


@pytest.mark.parametrize(
    ("name", "kind"), [("models:/assistant/3", "download"), ("smol", "copy"), ("a" * 12, "packed")]
)
def test_rm_removes_an_entry(name: str, kind: str) -> None:
    """``rm`` takes the name or the model of the table, and removes that entry alone."""
    done = command("rm", name)
    assert (done.exit_code, done.stdout.startswith(f"removed {kind} ")) == (0, True), done.output
    assert kind not in [one["kind"] for one in listed()]
    assert len(listed()) == 2


def test_rm_of_what_a_process_holds() -> None:
    """A download that a process uses is not removed, and the error says so."""
    assert downloads.hold_paths([str(downloads.place() / ("d" * 20))])
    refused = command("rm", "models:/assistant/3")
    downloads.keep_only([])
    assert refused.exit_code == 1
    assert "in use: dddddddd" in refused.stderr
    assert len(listed()) == 3


@pytest.mark.parametrize("name", ["nothing", "models:/other/1", "", "../x"])
def test_rm_of_nothing(name: str) -> None:
    """A name that the cache does not have removes nothing; a registered model needs a flag of its own."""
    refused = command("rm", name)
    assert refused.exit_code == 1
    assert f"the cache has no {name}" in refused.stderr
    assert ("--registered" in refused.stderr) == name.startswith("models:/")
    assert len(listed()) == 3


@pytest.mark.parametrize("name", ["models:/assistant", "assistant", "models:/assistant@champion"])
def test_rm_registered_needs_a_version(name: str) -> None:
    """A whole registered model, or one by an alias, is never deleted."""
    refused = command("rm", "--registered", name)
    assert refused.exit_code == 2
    assert "name one version, as NAME/VERSION" in refused.stderr


def test_prune_removes_what_is_old() -> None:
    """``prune`` removes what was not used for a month; --dry-run only says so, --all takes everything unused."""
    said = command("models", "prune", "--dry-run").stdout
    assert "would remove copy smol-0123456789abcdef, 500 bytes" in said
    assert len(listed()) == 3
    assert "700 bytes freed" in command("models", "prune").stdout
    assert [one["kind"] for one in listed()] == ["download"]
    assert "1 kB freed" in command("models", "prune", "--all").stdout
    assert listed() == []


def test_copies_are_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the copies unused for longest leave, but none that was used within a day."""
    monkeypatch.setenv(cached_copies.LIMIT_VARIABLE, "1kB")
    fresh = cache / "models" / "new-0123456789abcdef"
    fresh.mkdir()
    (fresh / "weights").write_bytes(bytes(2000))
    cached_copies.trim(keep=fresh)
    assert [path.name for path, _, _ in cached_copies.entries()] == [fresh.name]
    monkeypatch.setenv(cached_copies.LIMIT_VARIABLE, "lots")
    with pytest.raises(Exception, match="'lots' is not a number of bytes"):
        cached_copies.trim(keep=fresh)
