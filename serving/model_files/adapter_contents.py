"""The files of an adapter as one content with a hash, which is the same on every host.

A content is its description, the canonical JSON of name, size and SHA-256 of each file, and the bytes of the files one
after another. Its hash is the SHA-256 of the description. In the cache it is a download (``downloads``) of its own,
``adapter-<hash>``, which has been compared with the hash and never changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ..interface.errors import PackagingError
from . import downloads

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK_BYTES = 1 << 20
HASH = re.compile(r"[0-9a-f]{64}")
Read = Callable[[int], bytes | None]
"""A reader of the stored parts of a content: 0 is its description, the others are its bytes; None after the last."""


class AdapterFile(Struct, frozen=True, array_like=True):
    name: str
    size: int
    sha256: str


class AdapterContent(Struct, frozen=True):
    """The content of an adapter, without its bytes."""

    files: tuple[AdapterFile, ...]

    @property
    def described(self) -> bytes:
        """The description, of which ``content_hash`` is the hash."""
        return msgspec.json.encode(self.files)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.described).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


def content_of(folder: str | os.PathLike[str], *, maximum: int | None = None) -> AdapterContent:
    """Return the content of the adapter in ``folder``, whose files are read as a whole.

    Raises ``PackagingError`` if they cannot be read, are larger than ``maximum`` together, or change meanwhile.
    """
    place = Path(folder)
    try:
        before = [_regular(place, name) for name in FILES]
        if maximum is not None and (size := sum(found.st_size for found in before)) > maximum:
            raise PackagingError(f"its files have {size} bytes; {maximum} are allowed")
        files = tuple(
            AdapterFile(name, found.st_size, _digest(place / name)) for name, found in zip(FILES, before, strict=True)
        )
        after = [_regular(place, name) for name in FILES]
    except OSError as error:
        raise PackagingError(f"its files cannot be read: {error.strerror or error}") from None
    if [_stamp(found) for found in before] != [_stamp(found) for found in after]:
        raise PackagingError("its files changed while they were read; try again")
    return AdapterContent(files)


def pieces(content: AdapterContent, folder: str | os.PathLike[str]) -> Iterator[tuple[str, int, int]]:
    """Yield path, offset and size of each part of the bytes of ``content``, whose files are in ``folder``."""
    for file in content.files:
        for offset in range(0, file.size, CHUNK_BYTES):
            yield os.path.join(folder, file.name), offset, min(CHUNK_BYTES, file.size - offset)


def read_piece(path: str, offset: int, size: int) -> bytes:
    """Return a part of a file. Raises ``PackagingError`` if the file is shorter by now, or gone."""
    try:
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise PackagingError(f"its files cannot be read: {error.strerror or error}") from None
    if len(data) != size:
        raise PackagingError("its files changed while they were read; try again")
    return data


def local_path(content_hash: str) -> str:
    """Return where the cache has a content, which this process then holds; "" if it has not."""
    key = _key(content_hash)
    try:
        path = str(downloads.place() / key)
    except OSError:
        return ""
    return path if os.path.isdir(path) and downloads.hold_paths([path]) else ""


def fetch(content_hash: str, read: Read, label: str) -> str:
    """Return where the cache has a content, which is fetched from ``read`` if it is missing.

    Raises ``PackagingError`` if what is read is not that content, ``OSError``, and what ``read`` raises.
    """
    return str(downloads.entry(_key(content_hash), lambda part: _fill(part, content_hash, read), label))


def _fill(part: Path, content_hash: str, read: Read) -> None:
    described = read(0)
    if described is None or hashlib.sha256(described).hexdigest() != content_hash:
        raise PackagingError("the database has no such content, or a damaged one")
    content = AdapterContent(msgspec.json.decode(described, type=tuple[AdapterFile, ...]))
    if {file.name for file in content.files} != set(FILES):
        raise PackagingError("it has other files than an adapter")
    downloads.make_room(content.num_bytes)
    shutil.rmtree(part)  # what an attempt that was killed has left
    part.mkdir(mode=0o700)
    number, rest = 1, b""
    for file in content.files:
        found, left = hashlib.sha256(), file.size
        with open(part / file.name, "wb") as sink:
            while left:
                if not rest:
                    data = read(number)
                    if not data:
                        raise PackagingError("its content in the database is not whole")
                    number, rest = number + 1, data
                taken, rest = rest[:left], rest[left:]
                sink.write(taken)
                found.update(taken)
                left -= len(taken)
        if found.hexdigest() != file.sha256:
            raise PackagingError("its content in the database is damaged")


def _key(content_hash: str) -> str:
    if not HASH.fullmatch(content_hash):
        raise PackagingError(f"{content_hash[:80]!r} is not the hash of a content")
    return f"adapter-{content_hash}"


def _regular(place: Path, name: str) -> os.stat_result:
    found = os.stat(place / name)
    if not stat.S_ISREG(found.st_mode):
        raise PackagingError(f"{name} is not a file")
    return found


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return (found.st_ino, found.st_size, found.st_mtime_ns)
