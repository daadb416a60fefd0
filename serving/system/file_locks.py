"""Locks that the kernel releases when their holder dies, however it dies: flock on a file.

A lock belongs to the open file, which a forked child shares. Every lock held here is therefore closed in a forked
child, so that the child never keeps its parent's lock alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator

POLL_SECONDS = 0.02
LOCK = "lock"  # the lock file in a directory, held by the directory's creator
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: a symbolic link is never one of our locks


class FileLock:
    """A held flock, created by ``acquire`` or ``try_acquire`` and released by ``release`` or the holder's death."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        _held.add(self)

    def release(self, *, unlink: bool = False) -> None:
        """Release the lock. Unlinking happens while it is still held, so no process can hold a file that is gone."""
        if self.fd < 0:
            return
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        # explicit: a child forked at this moment may hold a copy of the descriptor
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.give_away()

    def give_away(self) -> None:
        """Close our descriptor without unlocking: a copy of it in another process continues to hold the lock."""
        fd, self.fd = self.fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    @property
    def is_current(self) -> bool:
        """Whether the file at ``path`` is still the one held (it may have been removed with its directory)."""
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


def try_acquire(path: str, *, create: bool = True, shared: bool = False) -> FileLock | None:
    """Return the lock on ``path``, or None while another holder has it.

    A ``shared`` lock may have many holders, and none beside an exclusive one. The file is created if it is missing,
    unless ``create`` is False. Raises ``OSError`` if there is no such directory or file.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
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
    """Wait for the lock on ``path``. Raises ``TimeoutError`` after ``timeout`` seconds.

    It polls instead of blocking in flock, so that greenlets, signals and ``timeout`` work.
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
        sleep(POLL_SECONDS)


def create_locked(path: str) -> FileLock:
    """Create a file that is already locked when its name appears, and return the lock.

    A process that finds the file thus never finds it unlocked while its creator lives. Raises ``FileExistsError`` if
    another process is creating it, and ``OSError``.
    """
    hidden = _hidden(path)
    lock = try_acquire(hidden)
    if lock is None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(hidden, path)
    lock.path = path
    return lock


def create_locked_directory(path: str) -> FileLock:
    """Create a directory whose file ``lock`` is already locked when its name appears, like ``create_locked``.

    Missing parents are created; only the owner may use the directories (0700). Raises ``OSError``.
    """
    hidden = _hidden(path)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    # this may have to wait: a process that checks whether the lock is held takes it for a moment
    lock = acquire(os.path.join(hidden, LOCK), make_parent=lambda: os.mkdir(hidden, 0o700))
    os.rename(hidden, path)
    lock.path = os.path.join(path, LOCK)
    return lock


def _hidden(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}")


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, exclusive: bool = True) -> Iterator[None]:
    """Hold the lock on ``path`` for the block, exclusively or shared with other readers.

    The file is created if it is missing. Waits in the kernel without a time limit, so use it only for locks that are
    held for milliseconds. Raises ``OSError``.
    """
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def is_held(path: str) -> bool:
    """Return whether some process (including this one) holds the lock on ``path``; a missing file is not held.

    Checking takes a free lock for a moment: ``acquire`` then tries again, but ``try_acquire`` may find the lock held. A
    file that exists but cannot be opened (no descriptor left, no permission) counts as held: a living owner must not be
    taken for dead.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno not in NOT_THERE
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)  # explicit: a child forked at this moment may hold a copy of the descriptor
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
