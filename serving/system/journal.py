"""An engine's own count of the tokens it generated for each metered request, written so that no crash loses any.

::

    <root>/<engine>/
        lock               held with flock while the engine lives
        running            a slot (``progress``) for each running request: its serial number and tokens so far
        ended-<position>   a line for each request that has ended: serial, tokens, request id; <position> is the number
                           of bytes in the files before it

The engine writes before it sends: its count is never below what any client has. ``metering.engine_journals`` reads it.
An engine that clients on other hosts use keeps the journals of their requests on its own host, below the id of the
store that the clients' ledger has (``journals_of``).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from msgspec import Struct

from .file_locks import LOCK, create_locked_directory, is_held
from .progress import ProgressFile, read_progress

ENGINES = "engines"
STORE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DONE = -1
"""The position after everything in a journal that is not written any more."""
FILE_BYTES = 1 << 20
"""A file of ended requests is followed by another from this size on, so that what was read can be removed."""


class Generated(Struct, frozen=True, kw_only=True):
    """The ``tokens`` that one engine generated for ``request_id``; a request may have run on several engines."""

    request_id: str
    tokens: int


class JournalEntry:
    """One running request."""

    __slots__ = ("request_id", "serial", "slot", "tokens")

    def __init__(self, request_id: str, serial: int, slot: int) -> None:
        self.request_id, self.serial, self.slot = request_id, serial, slot
        self.tokens = 0


class Journal:
    """The engine's side, for one thread. Every method may raise ``OSError`` (a full disk)."""

    def __init__(self, root: Path, name: str) -> None:
        self.directory = root / name
        self._lock = create_locked_directory(str(self.directory))
        self._serial = self._position = self._size = 0
        try:
            self._ended = self._next_file()
            self.running = ProgressFile(self.directory / "running")
        except OSError:  # a full disk
            shutil.rmtree(self.directory, ignore_errors=True)
            self._lock.release()
            raise

    def begin(self, request_id: str) -> JournalEntry:
        self._serial += 1
        entry = JournalEntry(request_id, self._serial, self.running.take(request_id))
        self.running.put(entry.slot, entry.serial, 0, 0)
        return entry

    def count(self, entry: JournalEntry, tokens: int) -> None:
        entry.tokens += tokens
        self.running.put(entry.slot, entry.serial, 0, entry.tokens)

    def end(self, entries: list[JournalEntry]) -> None:
        """Write the line, then free the slot. A kill between the two leaves both, which the serial number resolves."""
        lines = [f"{e.serial} {e.tokens} {e.request_id}\n" for e in entries if e.tokens]
        if lines:
            self.append("".join(lines).encode())
        for entry in entries:
            self.running.give_back(entry.slot)

    def append(self, data: bytes) -> None:
        if self._size >= FILE_BYTES:
            os.close(self._ended)
            self._position, self._size = self._position + self._size, 0
            self._ended = self._next_file()
        written = os.write(self._ended, data)
        if written != len(data):
            os.ftruncate(self._ended, self._size)  # the slots still hold the counts
            raise OSError("short write to the journal")
        self._size += written

    def _next_file(self) -> int:
        path = self.directory / f"ended-{self._position:016d}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the files. Requests that are still running stay in their slots, as after a kill."""
        self.running.close()
        os.close(self._ended)
        self._lock.release()


class WrittenJournal:
    """A journal as its reader sees it. The engine may still be writing to it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, directory.name

    def is_final(self) -> bool:
        """Return whether the engine has ended, so that nothing more will be written."""
        return not is_held(str(self.directory / LOCK))

    def ended(self, position: int, limit: int) -> tuple[list[Generated], int]:
        """Return at most ``limit`` requests after byte ``position``, and the position after them."""
        found: list[Generated] = []
        for start, path in self._files():
            if start + path.stat().st_size <= position:
                continue
            for line in _whole_lines(path, max(0, position - start)):
                if len(found) == limit:
                    return found, position
                found.append(_parsed(line))
                position += len(line)
        return found, position

    def after(self, position: int, limit: int) -> tuple[list[Generated], int]:
        """Return at most ``limit`` counts of requests that ended after byte ``position``, and the position after them.

        At the end of a dead engine's journal, what it had not ended is added, and the position is ``DONE``.
        """
        final = self.is_final()  # checked first: if it is final, everything is there to be read below
        found, reached = self.ended(position, limit)
        return (found + self.running(), DONE) if final and len(found) < limit else (found, reached)

    def running(self) -> list[Generated]:
        """Return what a dead engine had generated for requests that it had not ended."""
        files = self._files()
        written = {int(line.split(b" ", 1)[0]) for line in _whole_lines(files[-1][1], 0)} if files else set()
        slots = read_progress(self.directory / "running")
        return [
            Generated(request_id=slot.request_id, tokens=slot.completion)
            for slot in slots
            if slot.completion and slot.prompt not in written  # ``prompt`` is the serial number here
        ]

    def forget(self, position: int) -> None:
        """Remove the files that end before ``position``; the newest file stays."""
        for start, path in self._files()[:-1]:
            if start + path.stat().st_size <= position:
                path.unlink(missing_ok=True)

    def remove(self) -> bool:
        """Remove the journal; return False if it is still there (a disk that cannot be written)."""
        shutil.rmtree(self.directory, ignore_errors=True)
        return not self.directory.exists()

    def _files(self) -> list[tuple[int, Path]]:
        return [(int(path.name.removeprefix("ended-")), path) for path in sorted(self.directory.glob("ended-*"))]


def _whole_lines(path: Path, start: int) -> list[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        return [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]


def _parsed(line: bytes) -> Generated:
    _, tokens, request_id = line.decode().rstrip("\n").split(" ", 2)
    return Generated(request_id=request_id, tokens=int(tokens))


def journals_of(state_dir: Path, store_id: str) -> Path:
    """Return the directory in which the engines of a host keep the journals of a store."""
    return state_dir / store_id / ENGINES


def journals(root: Path) -> list[WrittenJournal]:
    """Return every journal under ``root``, except those that are just being created."""
    if not root.is_dir():
        return []
    return [WrittenJournal(path) for path in sorted(root.iterdir()) if not path.name.startswith(".")]
