"""The user's cache: downloads, models that were logged on the fly, and packed weights, with sizes and last use."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from ...model_files import cached_copies, downloads
from ...system.files import cache_dir

Kind = Literal["download", "copy", "packed"]
PACKED = "packed"
HASH_SHOWN = 12


class Cached(Struct, frozen=True, kw_only=True):
    """An entry of the cache. ``used`` is in seconds since the epoch; ``name`` is what ``rm`` takes."""

    kind: Kind
    name: str
    model: str
    path: str
    size: int
    used: float


def cached() -> list[Cached]:
    """Return the entries of the cache, those used last first. Raises ``OSError`` for a user who can have none."""
    found = [*_downloads(), *_copies(), *_packed()]
    return sorted(found, key=lambda one: -one.used)


def remove(entry: Cached, folders_in_use: Iterable[str]) -> bool:
    """Remove an entry; return False if a process uses it."""
    if any(folder == entry.path or folder.startswith(f"{entry.path}{os.sep}") for folder in folders_in_use):
        return False
    if entry.kind == "download":
        return downloads.remove(entry.name)
    if entry.kind == "copy":
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)  # engines that have mapped it keep it
    return True


def _downloads() -> Iterable[Cached]:
    for used, path, sizes in downloads.entries():
        yield Cached(
            kind="download",
            name=path.name,
            model=downloads.label_of(path.name) or path.name[:HASH_SHOWN],
            path=str(path),
            size=sum(sizes.values()),
            used=used,
        )


def _copies() -> Iterable[Cached]:
    for path, size, used in cached_copies.entries():
        name = path.name.rpartition("-")[0]
        yield Cached(kind="copy", name=path.name, model=name, path=str(path), size=size, used=used)


def _packed() -> Iterable[Cached]:
    place = cache_dir(PACKED)
    with contextlib.suppress(FileNotFoundError):
        for path in place.iterdir():
            with contextlib.suppress(OSError):
                if path.is_file() and not path.name.startswith("."):
                    found = path.stat()
                    name = path.name[:HASH_SHOWN]
                    yield Cached(
                        kind="packed", name=name, model="", path=str(path), size=found.st_size, used=found.st_mtime
                    )


def total(entries: Iterable[Cached]) -> int:
    """Return the bytes that entries take on the disk: files that several have count once."""
    sizes: dict[tuple[int, int], int] = {}
    for entry in entries:
        path = Path(entry.path)
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(OSError):
                known = file.lstat()
                if not file.is_dir():
                    sizes[known.st_dev, known.st_ino] = known.st_size
    return sum(sizes.values())
