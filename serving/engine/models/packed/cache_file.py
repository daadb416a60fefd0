"""Packed weights on disk: a model is packed once, and later starts map the file and share its pages.

::

    file   magic | length of the header | header (JSON) | sections, each at a multiple of 4096
    name   <key>-<SHA-256 of the whole file>

The name identifies the model, settings and kernels that a file belongs to, and the hash of its content. A file with
another owner, mode or hash is not used. A file holds no code, and nothing is unpickled. It is written under another
name, renamed when it is complete, and never changed. When all files together exceed the limit, those unused for longest
are removed. It is safe to remove a file that is mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from ....system import load_steps
from ....system.files import cache_dir, is_private

logger = logging.getLogger(__name__)

MAGIC = b"MLTPACK1"
ALIGNMENT_BYTES = 4096
MAX_HEADER = 64 << 20
CHUNK_BYTES = 16 << 20
PART = ".part-"
ABANDONED_SECONDS = 3600.0  # seconds after which an unfinished file is taken to have no writer any more
ROOM_FACTOR = 2  # a file is written only if the disk has this many times its size free
PLACE = "packed"  # folder in the cache directory
Array = np.ndarray[Any, Any]


class Section(Struct, frozen=True):
    """An array in the file. ``dtype`` is numpy's string for its type."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the end of the header, aligned


class Header(Struct, frozen=True, kw_only=True):
    """The header of a file. ``facts`` come from the writer and consist of plain values."""

    sections: dict[str, Section]
    facts: dict[str, Any]


def open_packed(key: str) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Open read-only arrays over the file of ``key``, and its facts; None if there is no intact one."""
    for path in _files(key):
        try:
            return _mapped(path)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("packed weights %s are not used: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def _files(key: str) -> list[Path]:
    try:
        place = cache_dir(PLACE)
        _check(place.lstat(), stat.S_ISDIR)
        return sorted(path for path in place.iterdir() if path.name.startswith(f"{key}-"))
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("the cache of packed weights is not used: %s", error)
        return []


def _check(found: os.stat_result, kind: Any) -> None:
    """Raise ``ValueError`` if other users may change the file or folder."""
    if not kind(found.st_mode) or not is_private(found):
        raise ValueError("it is not private to this user")


def _mapped(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        _check(os.fstat(fd), stat.S_ISREG)
        load_steps.report("checking packed weights", total=os.fstat(fd).st_size)
        if hashlib.file_digest(file, "sha256").hexdigest() != path.name.rpartition("-")[2]:
            raise ValueError("its content is not what its name says")
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(memory[len(MAGIC) : len(MAGIC) + 8], "little")
    if memory[: len(MAGIC)] != MAGIC or length > MAX_HEADER:
        raise ValueError("it is of another format")
    start = len(MAGIC) + 8
    header = msgspec.json.decode(memory[start : start + length], type=Header)
    first = _aligned(start + length)
    arrays = {
        name: np.frombuffer(memory, dtype=one.dtype, count=int(np.prod(one.shape)), offset=first + one.offset).reshape(
            one.shape
        )
        for name, one in header.sections.items()
    }
    with contextlib.suppress(OSError):
        os.utime(path)  # marks it as just used
    return arrays, header.facts


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def write_packed(
    key: str,
    arrays: Mapping[str, Array],
    facts: dict[str, Any],
    limit: int,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Write the file of ``key``, within ``limit`` bytes for all such files.

    ``confirm`` is called when all is written; if it raises, no file is left. A file that does not fit, or a disk that
    is too full, is logged. Raises ``OSError`` or ``ValueError`` if writing fails, and what ``confirm`` raises.
    """
    sections, offset = {}, 0
    for name, array in arrays.items():
        sections[name] = Section(array.dtype.str, tuple(array.shape), offset)
        offset = _aligned(offset + array.nbytes)
    header = msgspec.json.encode(Header(sections=sections, facts=facts))
    place = cache_dir(PLACE)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(place.lstat(), stat.S_ISDIR)
    size = _aligned(len(MAGIC) + 8 + len(header)) + offset
    if size > limit or shutil.disk_usage(place).free < ROOM_FACTOR * size:
        logger.info("packed weights of %d bytes are not kept: over packed_cache, or the disk is too full", size)
        return
    _make_room(place, limit - size)
    fd, part = tempfile.mkstemp(prefix=f"{PART}{key}-", dir=place)
    try:
        with open(fd, "wb", buffering=0) as file:
            digest = _write(file, [MAGIC + len(header).to_bytes(8, "little") + header], hashlib.sha256())
            digest = _write(
                file, (np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays.values()), digest
            )
        confirm()
        os.rename(part, place / f"{key}-{digest.hexdigest()}")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _write(file: Any, pieces: Iterable[bytes | memoryview], digest: Any) -> Any:
    """Write each piece, followed by zeros up to the next section; return the updated digest."""
    for piece in pieces:
        padding = bytes(_aligned(len(piece)) - len(piece))
        for chunk in (*(piece[at : at + CHUNK_BYTES] for at in range(0, len(piece), CHUNK_BYTES)), padding):
            digest.update(chunk)
            while chunk:  # a disk that is nearly full may take only a part
                chunk = chunk[file.write(chunk) :]
    return digest


def _make_room(place: Path, limit: int) -> None:
    """Remove abandoned unfinished files; then, down to ``limit`` bytes, the files unused for longest."""
    found = []
    for path in place.iterdir():
        with contextlib.suppress(OSError):
            known = path.lstat()
            if path.name.startswith(PART):
                if time.time() - known.st_mtime > ABANDONED_SECONDS:
                    path.unlink()
            else:
                found.append((known.st_mtime, known.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
