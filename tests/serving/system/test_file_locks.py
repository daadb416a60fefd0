"""Locks on files: those that appear under their names only when they are held, and those held for a block."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mlflow_llm.serving.system import file_locks
from mlflow_llm.serving.system.file_locks import create_locked, create_locked_directory, is_held, locked, try_acquire


def test_a_file_appears_locked(tmp_path: Path) -> None:
    """A new lock file is held from the moment it appears, and can be taken once released."""
    lock = create_locked(str(tmp_path / "one"))
    assert (os.listdir(tmp_path), lock.is_current, is_held(lock.path)) == (["one"], True, True)
    lock.release()
    assert not is_held(lock.path)


def test_a_file_that_another_creates_is_refused(tmp_path: Path) -> None:
    """A lock file that another process is creating under its hidden name is refused."""
    other = try_acquire(str(tmp_path / ".one"))
    assert other is not None
    with pytest.raises(FileExistsError):
        create_locked(str(tmp_path / "one"))
    other.release()


def test_a_directory_appears_locked(tmp_path: Path) -> None:
    """A new locked directory is private, with its parents, and leaves nothing of its hidden name."""
    path = tmp_path / "owners" / "one"
    lock = create_locked_directory(str(path))
    assert (os.listdir(path.parent), os.listdir(path), is_held(lock.path)) == (["one"], ["lock"], True)
    assert path.stat().st_mode & 0o077 == 0
    lock.release()
    assert not is_held(str(path / "lock"))


def test_asking_whether_a_new_directory_is_held_does_not_fail_its_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating a locked directory waits for a sweeping process that probes the lock for a moment."""
    asked: list[object] = []

    def taken_once(path: str, *, create: bool = True) -> file_locks.FileLock | None:
        asked.append(path)
        return None if len(asked) == 2 else try_acquire(path, create=create)

    monkeypatch.setattr(file_locks, "try_acquire", taken_once)
    monkeypatch.setattr(file_locks, "POLL_SECONDS", 0)
    lock = create_locked_directory(str(tmp_path / "one"))
    assert len(asked) == 3  # there is no directory, it is held, it is free
    assert lock.is_current
    lock.release()


def test_a_missing_file_is_not_created_on_request(tmp_path: Path) -> None:
    """Probing a missing lock file does not create it."""
    with pytest.raises(FileNotFoundError):
        try_acquire(str(tmp_path / "one"), create=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("code", "held"), [(errno.EMFILE, True), (errno.EACCES, True), (errno.ENOENT, False)])
def test_a_lock_that_cannot_be_looked_at_counts_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, held: bool
) -> None:
    """A lock that cannot be examined counts as held, and a missing file does not."""

    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_locks.os, "open", refuse)
    assert is_held(str(tmp_path / "x")) is held


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """The lock is free once the parent's descriptor is closed, though the child lives."""
    lock = create_locked_directory(str(tmp_path / "x"))
    (forked, has_forked), (end, ended) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(has_forked, b"x")  # after what is registered to run in a forked child
        os.close(ended)
        os.read(end, 1)
        os._exit(0)
    try:
        os.read(forked, 1)
        lock.give_away()  # as at the process's death, without unlocking
        assert not is_held(str(tmp_path / "x" / "lock"))
    finally:
        for fd in (forked, has_forked, end, ended):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_lock_is_held_for_a_block_alone_or_beside_readers(tmp_path: Path) -> None:
    """Readers share a lock and exclude writers, a writer excludes all, and after the block the lock is free."""
    path = str(tmp_path / "lock")
    with locked(path, exclusive=False), locked(path, exclusive=False):
        assert not is_held(path)
        assert try_acquire(path) is None
    with locked(path):
        assert is_held(path)
    lock = try_acquire(path)
    assert lock is not None
    lock.release()
    with pytest.raises(FileNotFoundError), locked(tmp_path / "gone" / "lock"):
        pass
