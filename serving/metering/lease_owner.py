"""Lease owners: the process that a lease belongs to, and whether it is still alive.

An owner is a directory under the metering state directory: ``lock`` (held with flock while the process lives; the
kernel lets go of it at any kind of end), ``progress`` and ``spool-*.jsonl``. It is built under a hidden name and
renamed when locked, so that nobody takes a new owner for a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import weakref
from pathlib import Path

from ..progress import ProgressFile
from .spool import Spool, spooled
from .staleness import StalenessDetector

STALE_SECONDS = 60.0


class LeaseOwner:
    """This process's directory, lock, progress file and spool."""

    def __init__(self, state_dir: Path) -> None:
        self.pid = os.getpid()
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:48]
        self.name = f"{host}.{self.pid}.{secrets.token_hex(6)}"
        owners_dir = state_dir / "owners"
        hidden = owners_dir / f".{self.name}"
        hidden.mkdir(parents=True, mode=0o700)
        self._lock_fd = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.directory = owners_dir / self.name
        hidden.rename(self.directory)
        self.progress = ProgressFile(self.directory / "progress")
        self.spool = Spool(self.directory)
        _owners.add(self)

    def close(self, *, settled: bool) -> None:
        """Let go; ``settled`` says that nothing is open, then the directory goes too (unless something is spooled)."""
        self.spool.close()
        self.progress.close()
        if settled and not spooled(self.directory):
            shutil.rmtree(self.directory, ignore_errors=True)
        self.forget()

    def forget(self) -> None:
        """Close the lock's descriptor: in a forked child, or the child would keep a dead parent's lock held."""
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)
        _owners.discard(self)


class DeadOwner:
    """The directory of a process that has ended, locked against other recoverers."""

    def __init__(self, directory: Path, lock_fd: int) -> None:
        self.name = directory.name
        self.directory = directory
        self._lock_fd = lock_fd

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        os.close(self._lock_fd)


def dead_owners(state_dir: Path, unfinished: StalenessDetector) -> list[DeadOwner]:
    """Every owner of this state directory whose process has ended and that nobody else is recovering. Removed is what
    a process left that ended while it made its directory: ``unfinished`` says for how long it has been so."""
    found: list[DeadOwner] = []
    halves: dict[str, None] = {}
    owners_dir = state_dir / "owners"
    for directory in sorted(owners_dir.iterdir()) if owners_dir.is_dir() else ():
        owner = dead(directory)
        if owner is not None and directory.name.startswith("."):
            owner.release()
        elif owner is not None:
            found.append(owner)
            continue
        if owner is not None or not (directory / "lock").exists():
            halves[directory.name] = None
    for name in unfinished.stale(halves):
        shutil.rmtree(owners_dir / name, ignore_errors=True)
    return found


def living_owners(state_dir: Path) -> list[str]:
    """Names of the owners of this state directory whose process lives (or that somebody recovers just now)."""
    owners_dir, living = state_dir / "owners", []
    for directory in sorted(owners_dir.iterdir()) if owners_dir.is_dir() else ():
        if (owner := dead(directory)) is not None:
            owner.release()
        elif (directory / "lock").exists():
            living.append(directory.name)
    return living


def dead(directory: Path) -> DeadOwner | None:
    """None where its process lives, or somebody else recovers it."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return DeadOwner(directory, fd)


def is_local(state_dir: Path, owner: str) -> bool:
    return (state_dir / "owners" / owner).is_dir()


_owners: weakref.WeakSet[LeaseOwner] = weakref.WeakSet()


def _after_fork() -> None:
    for owner in list(_owners):
        owner.forget()


os.register_at_fork(after_in_child=_after_fork)
