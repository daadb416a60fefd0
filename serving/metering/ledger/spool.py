"""The spool: settlements that the store could not take, kept in files until it can.

Each line is one JSON object, appended and fsynced before ``append`` returns. ``drain`` closes the current file, applies
the closed files in order, and unlinks each once all of it is in the store. Applying a settlement twice changes nothing,
so a crash at any point loses none and bills none twice. A torn last line comes from an ``append`` that never returned.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...system.files import sync_directory
from .settlement import Settlement

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Settlement).decode


class Spool:
    """The spool files of one process. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._number = max((_number(path) for path in spooled(directory)), default=0) + 1
        self._fd: int | None = None

    def append(self, settlement: Settlement) -> None:
        """Write a settlement to the disk. Raises ``OSError`` (a full disk)."""
        line = _encode(settlement) + b"\n"
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                sync_directory(self._directory)
            written = os.write(self._fd, line)
            if written != len(line):  # the disk filled up inside the line: end the file; the torn line is ignored
                self._close()
                raise OSError("short write to the spool")
            os.fsync(self._fd)

    @property
    def pending(self) -> bool:
        return bool(spooled(self._directory))

    def drain(self, apply: Callable[[Settlement], object]) -> int:
        """Apply and remove everything spooled so far, and return how many. If ``apply`` raises, its file stays."""
        with self._draining:
            with self._lock:
                self._close()
            return sum(drain_file(path, apply) for path in spooled(self._directory) if _number(path) < self._number)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _path(self) -> Path:
        return self._directory / f"spool-{self._number:08d}.jsonl"

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._number += 1


def spooled(directory: Path) -> list[Path]:
    """Return the spool files of an owner's directory, oldest first."""
    return sorted(directory.glob("spool-*.jsonl"))


def drain_file(path: Path, apply: Callable[[Settlement], object]) -> int:
    """Apply every whole line of ``path`` and unlink it."""
    settlements = _read(path)
    for settlement in settlements:
        apply(settlement)
    path.unlink(missing_ok=True)
    return len(settlements)


def spooled_ids(directory: Path) -> set[str]:
    """Return the request ids of settlements spooled in an owner's directory."""
    return {settlement.request_id for path in spooled(directory) for settlement in _read(path)}


def _read(path: Path) -> list[Settlement]:
    found = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError):
            found.append(_decode(line))
    return found


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("spool-"))
