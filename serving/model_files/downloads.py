"""The cache of models that came from remote stores: each is there once, for all processes, until others need its place.

::

    <key>/       a saved model, whole and verified; never changed
    <key>.lock   held by the process that downloads or removes the model, and shared by all that use it. The time of the
                 file is when the model was last taken into use
    <key>.part/  a download under way, or what a killed one left, which the next download of that model continues

The kernel releases the lock of a process that dies, so nothing is locked, or kept as in use, for ever. What no process
uses is removed, the least recently used first, when all models together exceed the limit or the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from ..interface.bundle import Bundle
from ..interface.errors import PackagingError
from ..system.file_locks import FileLock, try_acquire
from ..system.files import CACHE_VARIABLE, cache_dir
from ..system.sizes import readable
from .cache_limit import limit_of

logger = logging.getLogger(__name__)

PLACE = "downloads"  # folder in the cache directory
LIMIT_VARIABLE = "MLFLOW_LLM_DOWNLOADS_LIMIT"
ROOM_BYTES = 64 << 20  # bytes that a download leaves free on the disk
LOCK, PART = ".lock", ".part"
POLL_SECONDS = 0.05


def place() -> Path:
    """Return the directory of the downloads, which need not exist. Raises ``OSError`` as ``cache_dir`` does."""
    return cache_dir(PLACE)


def check_owner(path: Path) -> None:
    """Raise ``PackagingError`` if ``path`` exists and a user other than root or this one could have written it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or not private:
            raise PackagingError(
                f"{path}: models are not loaded from a directory that other users could have written;"
                f" remove it, or set {CACHE_VARIABLE} to one of your own"
            )


def entry(key: str, fill: Callable[[Path], None], label: str = "") -> Path:
    """Return the folder of the download ``key``, which this process then holds; ``fill(part)`` downloads a missing one.

    ``part`` is a directory that may have files of an earlier attempt. Of several processes and threads that ask at
    once, one downloads, and the others wait for it; if it fails or is killed, the next one tries. ``label`` is what
    people call the model. Raises what ``fill`` raises, ``OSError`` and ``PackagingError``.
    """
    root = place()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owner(root)
    path, lock_path, part = root / key, str(root / f"{key}{LOCK}"), root / f"{key}{PART}"
    while not _held.hold(root, key):
        lock = try_acquire(lock_path)
        if lock is None:
            time.sleep(POLL_SECONDS)
            continue
        try:
            if not path.is_dir():
                part.mkdir(exist_ok=True, mode=0o700)
                check_owner(part)
                fill(part)
                part.rename(path)
            if label:
                Path(lock_path).write_text(label, encoding="utf-8")
            os.utime(lock_path)
        finally:
            lock.release()
    check_owner(path)
    return path


def label_of(key: str) -> str:
    """Return what people call the download ``key``; "" if that is not known."""
    try:
        return (place() / f"{key}{LOCK}").read_text(encoding="utf-8")[:300]
    except (OSError, ValueError):
        return ""


def entries() -> list[tuple[float, Path, dict[tuple[int, int], int]]]:
    """Return the time of the last use, the path, and the sizes of the files by inode, of each download."""
    root = place()
    return list(_entries(root)) if root.is_dir() else []


def remove(key: str) -> bool:
    """Remove a download; return False if a process uses it. Raises ``LookupError`` if there is none."""
    path = place() / key
    if not key or os.sep in key or not path.is_dir():
        raise LookupError(key)
    return _remove(path)


def make_room(needed: int) -> None:
    """Remove models that no process uses until ``needed`` more bytes fit within the limit and on the disk.

    Removes what killed downloads have left, too, as long as nobody continues them. If what is in use leaves too little
    room, nothing more is removed, and the download is tried all the same. Raises ``PackagingError``, ``OSError``.
    """
    root, maximum = place(), limit_of(LIMIT_VARIABLE)
    if not root.is_dir():
        return
    _remove_leftovers(root)
    entries = sorted(_entries(root), key=lambda found: found[0])
    files: Counter[tuple[int, int]] = Counter()  # by inode: models share files
    for _, _, sizes in entries:
        files.update(sizes.keys())
    total = sum({inode: size for _, _, sizes in entries for inode, size in sizes.items()}.values())
    for _, path, sizes in entries:
        if total + needed <= maximum and shutil.disk_usage(root).free >= needed + ROOM_BYTES:
            return
        if not _remove(path):
            continue
        files.subtract(sizes.keys())
        freed = sum(size for inode, size in sizes.items() if not files[inode])
        total -= freed
        logger.info("removed %s, %s, from the cache of downloads", path.name, readable(freed))
    if total + needed > maximum:
        logger.warning(
            "the models in use and the next download have %s together, more than %s allows: %s",
            *(readable(total + needed), LIMIT_VARIABLE, readable(maximum)),
        )


def hold(bundle: Bundle) -> bool:
    """Hold the downloads that ``bundle`` consists of until this process ends. Return False if one of them is gone."""
    return hold_paths(paths_of(bundle))


def hold_paths(paths: Iterable[str]) -> bool:
    """Hold the downloads that contain ``paths``; the same as ``hold`` otherwise."""
    root = _root()
    missing = [key for key in _keys(root, paths) if not _held.hold(root, key)] if root is not None else []
    return not missing


def hold_for(owner: object, bundle: Bundle) -> Callable[[], object]:
    """Hold the downloads that ``bundle`` consists of as long as ``owner`` lives, or until the result is called.

    A download that no other owner has is then no longer held by this process, even if it was fetched by it.
    """
    root = _root()
    keys = _keys(root, paths_of(bundle)) if root is not None else set()
    if root is not None:
        for key in keys:
            _held.hold(root, key)
    _held.add_owner(keys)
    return weakref.finalize(owner, _held.drop_owner, keys)


def keep(bundle: Bundle) -> None:
    """Hold the downloads that ``bundle`` consists of until this process ends, whoever else drops them."""
    hold(bundle)
    root = _root()
    if root is not None:
        _held.add_owner(_keys(root, paths_of(bundle)))


def keep_only(paths: Iterable[str]) -> None:
    """Hold the downloads that contain ``paths``, and no others."""
    root = _root()
    if root is not None:
        keys = _keys(root, paths)
        for key in keys:
            _held.hold(root, key)
        _held.keep_only(keys)


def release_paths(paths: Iterable[str]) -> None:
    """Hold the downloads that contain ``paths`` no longer."""
    root = _root()
    if root is not None:
        _held.release(_keys(root, paths))


def paths_of(bundle: Bundle) -> list[str]:
    """Return the local folders of a bundle and of its draft model."""
    paths = [bundle.model_dir, bundle.tokenizer_dir, *bundle.adapters.values()]
    return paths if bundle.draft is None else [*paths, bundle.draft.model_dir, bundle.draft.tokenizer_dir]


class _Held:
    """The downloads that this process holds, each by one shared lock. Thread-safe; a forked child holds none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, FileLock] = {}
        self._owners: Counter[str] = Counter()

    def hold(self, root: Path, key: str) -> bool:
        """Hold the download ``key`` if it is there. Waits for a process that is just removing it."""
        path, lock_path = root / key, str(root / f"{key}{LOCK}")
        while path.is_dir():
            with self._lock:
                known = self._locks.get(key)
                if known is not None and known.path == lock_path and known.is_current:
                    return True
                try:
                    found = try_acquire(lock_path, shared=True)
                except OSError:  # the directory is gone, or is not ours to write to and is never removed
                    return path.is_dir()
                if found is not None and path.is_dir():
                    os.utime(lock_path)
                    self._locks[key] = found
                    return True
            if found is not None:
                found.release()
            time.sleep(POLL_SECONDS)
        return False

    def add_owner(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._owners.update(keys)

    def drop_owner(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._owners.subtract(keys)
            self._release(key for key in keys if self._owners[key] <= 0)

    def release(self, keys: set[str]) -> None:
        with self._lock:
            self._release(keys)

    def keep_only(self, keys: set[str]) -> None:
        with self._lock:
            self._release(self._locks.keys() - keys)

    def _release(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            if (lock := self._locks.pop(key, None)) is not None:
                with contextlib.suppress(OSError):
                    os.utime(lock.path)
                lock.release()


_held = _Held()


def _root() -> Path | None:
    """Return the directory of the downloads; None for a user who can have none."""
    try:
        return place()
    except OSError:
        return None


def _keys(root: Path, paths: Iterable[str]) -> set[str]:
    """Return the keys of the downloads that contain ``paths``; other paths are left out."""
    top = f"{root}{os.sep}"
    return {path[len(top) :].partition(os.sep)[0] for path in paths if path.startswith(top)}


def _entries(root: Path) -> Iterable[tuple[float, Path, dict[tuple[int, int], int]]]:
    """Yield the time of the last use, the path, and the sizes of the files by inode, of each download."""
    for path in root.iterdir():
        if path.suffix in (LOCK, PART) or not path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            lock_path = path.with_name(f"{path.name}{LOCK}")
            used = (lock_path if lock_path.exists() else path).stat().st_mtime
            stats = [file.lstat() for file in path.rglob("*") if not file.is_dir()]
            yield used, path, {(found.st_dev, found.st_ino): found.st_size for found in stats}


def _remove(path: Path) -> bool:
    """Remove a download, unless a process uses it."""
    lock = try_acquire(f"{path}{LOCK}")
    if lock is None:
        return False
    try:
        gone = path.with_name(f"{path.name}{PART}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)  # at once: nobody ever finds half a model
        shutil.rmtree(gone)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
        return False
    finally:
        lock.release(unlink=True)
    return True


def _remove_leftovers(root: Path) -> None:
    """Remove unfinished downloads that no process continues."""
    for part in root.glob(f"*{PART}"):
        key_path = part.with_suffix("")
        lock = try_acquire(f"{key_path}{LOCK}")
        if lock is not None:
            try:
                shutil.rmtree(part, ignore_errors=True)
            finally:
                lock.release(unlink=not key_path.exists())
