"""The cache of downloads between processes: who downloads, who waits, and what is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_llm.serving.interface.bundle import Bundle, DraftBundle
from mlflow_llm.serving.model_files import downloads

ENTRY = """
import sys
from pathlib import Path
from mlflow_llm.serving.model_files import downloads
def fill(part):
    (part / "first").write_text("whole")
    print("filling", flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.readline()
    (part / "weights").write_text("x" * 1000)
print(downloads.entry(sys.argv[1], fill), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path))
    return tmp_path / "downloads"


class Process:
    """A process that asks for the download ``key``, and then holds it until it is ended."""

    def __init__(self, key: str, *, waits: bool = False) -> None:
        command = [sys.executable, "-c", ENTRY, key, "wait" if waits else "go"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def end(self) -> None:
        self._process.communicate("")


def add(key: str, size: int = 1000) -> Path:
    """Put a download there that this process does not hold."""
    path = downloads.entry(key, lambda part: _write(part / "weights", size))
    downloads.keep_only(())
    return path


def _write(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)


def test_of_several_processes_one_downloads(cache: Path) -> None:
    """The others wait for it, and all get the same folder."""
    first = Process("a", waits=True)
    assert first.line() == "filling"
    others = [Process("a", waits=True) for _ in range(3)]
    assert not (cache / "a").exists()
    first.go_on()
    assert {one.line() for one in (first, *others)} == {str(cache / "a")}
    for one in (first, *others):
        one.end()


def test_another_goes_on_when_the_first_is_killed(cache: Path) -> None:
    """A killed process leaves its files to the next one, and nobody sees half a download."""
    first = Process("a", waits=True)
    assert first.line() == "filling"
    second = Process("a", waits=True)
    first.kill()
    assert second.line() == "filling"
    assert (cache / "a.part" / "first").read_text() == "whole"
    second.go_on()
    assert second.line() == str(cache / "a")
    assert not (cache / "a.part").exists()
    second.end()


def test_a_failed_download_is_tried_by_the_next(cache: Path) -> None:
    """An error goes to the one that downloads; the folder does not appear."""

    def fail(part: Path) -> None:
        raise OSError("the store is away")

    with pytest.raises(OSError, match="the store is away"):
        downloads.entry("a", fail)
    assert not (cache / "a").exists()
    assert add("a") == cache / "a"


def test_the_least_recently_used_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only as much is removed as the limit asks for, and with its lock."""
    for age, key in enumerate(("new", "middle", "old")):
        add(key)
        os.utime(cache / f"{key}.lock", (1000 - age, 1000 - age))
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "3kB")
    downloads.make_room(900)
    assert sorted(path.name for path in cache.iterdir()) == ["middle", "middle.lock", "new", "new.lock"]


def test_what_another_process_holds_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that process ends, however it ends."""
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "1")
    holder = Process("a")
    assert holder.line() == "filling"
    assert holder.line() == str(cache / "a")
    downloads.make_room(0)
    assert (cache / "a").is_dir()
    holder.kill()
    downloads.make_room(0)
    assert not (cache / "a").exists()


def test_a_full_disk_removes_what_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made on the disk, too, whatever the limit."""
    add("a")

    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    downloads.make_room(1)
    assert not (cache / "a").exists()


def test_what_killed_downloads_left_is_removed(cache: Path) -> None:
    """An unfinished download stays only while a process is at it."""
    running, killed = Process("running", waits=True), Process("killed", waits=True)
    for one in (running, killed):
        assert one.line() == "filling"
    killed.kill()
    downloads.make_room(0)
    assert (cache / "running.part").is_dir()
    assert not list(cache.glob("killed*"))
    running.kill()


def test_shared_files_count_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models with the same file need its bytes once, so that nothing is removed for it."""
    first = add("first")
    downloads.entry("second", lambda part: os.link(first / "weights", part / "weights"))
    downloads.keep_only(())
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "1500")
    downloads.make_room(0)
    assert (cache / "first").is_dir()
    assert (cache / "second").is_dir()


def test_a_bundle_is_held_with_its_draft(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, base of an adapter, adapter and draft may be four downloads; a missing one is reported."""
    for key in ("base", "adapter", "draft"):
        add(key)
    bundle = Bundle(
        content_hash="",
        tasks=("completions",),
        model_dir=str(cache / "base/model"),
        tokenizer_dir=str(cache / "base/tokenizer"),
        adapters={"one": str(cache / "adapter/adapters/one")},
        draft=DraftBundle(
            uri="", content_hash="", model_dir=str(cache / "draft/model"), tokenizer_dir=str(cache / "draft/tokenizer")
        ),
    )
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "1")
    assert downloads.hold(bundle)
    downloads.make_room(0)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["adapter", "base", "draft"]
    downloads.keep_only([bundle.model_dir])
    downloads.make_room(0)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["base"]
    assert not downloads.hold(bundle)
    downloads.keep_only(())


def test_a_directory_of_others_is_refused(cache: Path) -> None:
    """Keys can be guessed: nothing is taken from a place that other users can write to."""
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(Exception, match="models are not loaded from a directory that other users could have written"):
        add("a")
