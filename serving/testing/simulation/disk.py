"""A disk that can be full, fail, and lose what was not synced when its host loses power.

Its files are real ones, in memory. They show what the kernel shows to processes; beside them the disk remembers what
was synced: the bytes of a file at its last fsync, and the names in a directory at its last. After a loss of power every
other change may be there or not, each by itself: sectors of a file in any mixture, renames in any order.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from random import Random

SECTOR = 512


class Disk:
    """The disk of a host, below ``root``."""

    def __init__(self, root: Path, draw: Random) -> None:
        self.root = root
        self.is_full = False
        self.fails = 0.0
        """The share of syncs that fail."""
        self.lies = False
        """Whether syncs return before anything is on the disk, as behind a cache that loses its power."""
        self._draw = draw
        self._bytes: dict[int, bytes] = {}  # by inode: a file at its last fsync
        self._names: dict[int, dict[str, int]] = {}  # by inode: a directory's entries at its last
        self._former: dict[int, str] = {}  # by inode: the name before its last rename
        root.mkdir(parents=True, exist_ok=True)

    def check_room(self) -> None:
        """Raise ``OSError`` if the disk is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def renamed(self, path: Path, to: Path) -> None:
        """Note a rename that is about to happen."""
        if path.parent == to.parent:
            self._former[path.stat().st_ino] = path.name

    def fsync(self, path: Path) -> None:
        """Note what is on the disk from now on. Raises ``OSError``."""
        if self.fails and self._draw.random() < self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self.lies:
            self.sync(path)

    def sync(self, path: Path) -> None:
        if path.is_dir():
            self._names[path.stat().st_ino] = _entries(path)
        elif path.exists():
            self._bytes[path.stat().st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        survivors = self._survivors(self.root, self.root.stat().st_ino)
        shutil.rmtree(self.root)
        self._bytes, self._names, self._former = {}, {}, {}
        self._write(self.root, survivors)

    def _survivors(self, path: Path, inode: int) -> dict[str, object]:
        """Return what is left of the directory: names, and under each a file's bytes or another directory."""
        now = _entries(path) if path.is_dir() else {}
        synced = self._names.get(inode, {})
        kept: dict[str, int] = {}
        for name, entry in sorted({**synced, **now}.items()):
            before, after = synced.get(name), now.get(name)
            if before == after:
                kept[name] = entry
            elif after is None or (before is not None and self._draw.random() < 0.5):
                if before is not None and self._draw.random() < 0.5 and before not in kept.values():
                    kept[name] = before  # its removal, or its replacement, was lost
            else:
                self._keep_new(kept, name, after)
        return {name: self._contents(path, now, name, entry) for name, entry in kept.items()}

    def _keep_new(self, kept: dict[str, int], name: str, inode: int) -> None:
        fate = self._draw.random()
        if inode in kept.values():
            return
        if inode in self._former and fate < 0.3:
            kept[self._former[inode]] = inode  # it was made, and its rename was lost
        elif fate < 0.7:
            kept[name] = inode

    def _contents(self, path: Path, now: dict[str, int], name: str, inode: int) -> object:
        current = next((path / other for other, number in now.items() if number == inode), path / name)
        if inode in self._names or current.is_dir():
            return self._survivors(current, inode)
        written = current.read_bytes() if now.get(current.name) == inode else b""
        return self._torn(self._bytes.get(inode, b""), written)

    def _torn(self, synced: bytes, written: bytes) -> bytes:
        """Return a file's bytes after the loss of power: of each sector the synced state or the written one."""
        if synced == written:
            return synced
        fate = self._draw.random()
        if fate < 0.25:
            return synced
        if fate < 0.5:
            return written
        size = self._draw.randint(min(len(synced), len(written)), max(len(synced), len(written)))
        result = bytearray()
        for start in range(0, size, SECTOR):
            end = min(start + SECTOR, size)
            old, new = synced[start:end], written[start:end]
            if old == new:
                result += new
            else:
                result += (new if self._draw.random() < 0.5 else old).ljust(end - start, b"\0")
        return bytes(result)

    def _write(self, path: Path, contents: dict[str, object]) -> None:
        path.mkdir(mode=0o700)
        for name, found in contents.items():
            if isinstance(found, dict):
                self._write(path / name, found)
            else:
                assert isinstance(found, bytes)
                (path / name).write_bytes(found)
                self.sync(path / name)
        self.sync(path)


def _entries(path: Path) -> dict[str, int]:
    with os.scandir(path) as found:
        return {entry.name: entry.inode() for entry in found}
