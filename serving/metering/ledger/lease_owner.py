"""Lease owners: the process that a lease belongs to, and whether it is still alive.

An owner is a directory under the metering state directory: ``lock`` (held while the process lives), ``progress`` and
``spool-*.jsonl``. The directory gets its name once it is locked (``file_locks``), so that a new owner is never taken
for a dead one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from pathlib import Path

from ...system.file_locks import LOCK, FileLock, create_locked_directory, is_held, try_acquire
from ...system.files import sync_directory
from ...system.progress import ProgressFile
from ..store.staleness import StalenessDetector
from .spool import Spool, spooled

STALE_SECONDS = 60.0
OWNERS = "owners"  # below a store's state directory


class LeaseOwner:
    """This process's directory, lock, progress file and spool. Raises ``OSError`` (a full disk)."""

    def __init__(self, state_dir: Path) -> None:
        self.pid = os.getpid()
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:48]
        self.name = f"{host}.{self.pid}.{secrets.token_hex(6)}"
        self.directory = state_dir / OWNERS / self.name
        self._lock = create_locked_directory(str(self.directory))
        try:
            for directory in (self.directory.parent, state_dir, state_dir.parent):
                sync_directory(directory)  # a file that is synced later is lost all the same with a directory above it
            self.progress = ProgressFile(self.directory / "progress")
        except OSError:  # a full disk
            shutil.rmtree(self.directory, ignore_errors=True)
            self._lock.release()
            raise
        self.spool = Spool(self.directory)

    def close(self, *, settled: bool) -> None:
        """Release the lock. If ``settled`` (no lease is open), remove the directory unless something is spooled."""
        self.spool.close()
        self.progress.close()
        if settled and not spooled(self.directory):
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()


class DeadOwner:
    """The directory of an ended process, locked against other recovering processes."""

    def __init__(self, directory: Path, lock: FileLock) -> None:
        self.name = directory.name
        self.directory = directory
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        self._lock.release()


def take_over(directory: Path) -> DeadOwner | None:
    """Lock and return the owner with this directory; None while its process lives or another process recovers it."""
    try:
        lock = try_acquire(str(directory / LOCK), create=False)
    except OSError:
        return None
    return None if lock is None else DeadOwner(directory, lock)


def take_over_dead(state_dir: Path) -> list[DeadOwner]:
    """Lock and return all owners of this state directory that have ended and that no other process is recovering."""
    named = (path for path in _directories(state_dir) if not path.name.startswith("."))
    return [owner for path in named if (owner := take_over(path)) is not None]


def remove_unfinished(state_dir: Path, unfinished: StalenessDetector) -> None:
    """Remove directories of processes that ended while creating them, once they have been unfinished for a while."""
    hidden = [path for path in _directories(state_dir) if path.name.startswith(".") and not _is_locked(path)]
    unlocked = [path for path in _directories(state_dir) if not (path / LOCK).exists()]
    for name in unfinished.observe({path.name: None for path in (*hidden, *unlocked)}):
        shutil.rmtree(state_dir / OWNERS / name, ignore_errors=True)


def living_owners(state_dir: Path) -> list[str]:
    """Return the names of this state directory's owners that are alive, or being recovered at this moment."""
    return [path.name for path in _directories(state_dir) if _is_locked(path)]


def is_local(state_dir: Path, owner: str) -> bool:
    """Return whether ``owner`` is a process of this host and state directory."""
    return (state_dir / OWNERS / owner).is_dir()


def _directories(state_dir: Path) -> list[Path]:
    folder = state_dir / OWNERS
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_locked(directory: Path) -> bool:
    return is_held(str(directory / LOCK))
