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
from collections.abc import Callable, Iterator

POLL_INTERVAL = 0.02
LOCK = "lock"  # in a directory whose creator holds it
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a symbolic link is no lock of ours


class FileLock:
    """A held flock. Made by ``acquire`` and ``try_acquire``; given back by ``release`` or the holder's death."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        _held.add(self)

    def release(self, *, unlink: bool = False) -> None:
        """Unlinking happens while the lock is still held, so no process can hold a file that is already gone."""
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


def try_acquire(path: str, *, create: bool = True) -> FileLock | None:
    """The lock on ``path``; None while another holds it.

    The file is created where it is missing, unless ``create`` is False. Raises ``OSError``: there is no such directory,
    or no such file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
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


def create_locked(path: str) -> FileLock:
    """The lock on a new file, which gets its name only when it is locked: who finds it finds its holder alive.

    Raises ``FileExistsError`` where another process is creating it, ``OSError``.
    """
    hidden = _hidden(path)
    lock = try_acquire(hidden)
    if lock is None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(hidden, path)
    lock.path = path
    return lock


def create_locked_directory(path: str) -> FileLock:
    """The lock on ``lock`` in a new directory, which gets its name only when that is locked: as ``create_locked``.

    Missing parents are created; directories are their owner's alone (0700). Raises ``OSError``.
    """
    hidden = _hidden(path)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    # waited for: another process that asks whether it is held takes it for a moment
    lock = acquire(os.path.join(hidden, LOCK), make_parent=lambda: os.mkdir(hidden, 0o700))
    os.rename(hidden, path)
    lock.path = os.path.join(path, LOCK)
    return lock


def _hidden(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}")


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, exclusive: bool = True) -> Iterator[None]:
    """Hold the lock on ``path``, created where it is missing, for the block: alone, or shared with other readers.

    Waits in the kernel and without end: for locks that are held for milliseconds. Raises ``OSError``.
    """
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def is_held(path: str) -> bool:
    """Whether some process (this one included) holds the lock on ``path``; a missing file is not held.

    Looking takes a free lock for a moment: ``acquire`` tries again, ``try_acquire`` may take it for held. A file that
    is there and cannot be opened (no descriptor left, no permission) counts as held: a living owner must not be taken
    for dead.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno not in NOT_THERE
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)  # explicit, for the sake of a child forked just now
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
