"""Locks that the kernel takes back when their holder dies, however it dies: flock on a file.

A lock belongs to the open file, which a forked child shares: every lock held here is closed in a forked child, so
that the child never keeps its parent's lock alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from collections.abc import Callable

POLL_INTERVAL = 0.02
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class FileLock:
    """A held flock. Made by ``acquire`` and ``try_acquire``; given back by ``release`` or the holder's death."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        _held.add(self)

    def release(self, *, unlink: bool = False) -> None:
        """Unlinking happens while the lock is still held, so nobody can hold a file that is already gone."""
        if self.fd < 0:
            return
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        # explicit: a child forked in this moment may hold a copy of the descriptor
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.give_away()

    def give_away(self) -> None:
        """Close our descriptor without unlocking: a copy of it in another process goes on holding the lock."""
        fd, self.fd = self.fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    @property
    def is_current(self) -> bool:
        """Whether the file at ``path`` is still the one we hold (it may have been removed with its directory)."""
        return self.fd >= 0 and _same_file(self.fd, self.path)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.give_away()


os.register_at_fork(after_in_child=_forget_in_child)


def _same_file(fd: int, path: str) -> bool:
    try:
        ours, theirs = os.fstat(fd), os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def try_acquire(path: str) -> FileLock | None:
    """The lock on ``path``, created if missing; None while another holds it. Raises OSError (no such directory)."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        if _same_file(fd, path):
            return FileLock(path, fd)
        os.close(fd)  # its holder removed the file between our open and our lock


def acquire(
    path: str,
    *,
    make_parent: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> FileLock:
    """Wait for the lock on ``path``. Raises TimeoutError after ``timeout`` seconds.

    Polls instead of blocking in flock, so that greenlets, signals and ``timeout`` work.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            lock = try_acquire(path)
        except FileNotFoundError:  # the last holder removed the empty directory
            make_parent()
            continue
        if lock is not None:
            return lock
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"{path} is locked by another process")
        sleep(POLL_INTERVAL)


def is_held(path: str) -> bool:
    """Whether some process (this one included) holds the lock on ``path``; a missing file is not held.

    Looking takes a free lock for a moment: ``acquire`` tries again, ``try_acquire`` may take it for held. Where no file
    can be opened it is called held: who lives must not be taken for dead."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno in EXHAUSTED
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)  # explicit, for the sake of a child forked just now
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
