"""The output file of a batch, from which a restart also reads what is done.

An answer is one line, appended and on the disk before it counts; a truncated line, which a kill may leave at the end,
is removed. Each carries its row's key, so that answers to another input are recognised. When every row has its line
the file is rewritten in the input's order (``files.replacing``).

A new file is readable by its owner alone, an existing one keeps its mode. Symbolic links are not followed: in a shared
folder another user could have put them there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...interface.errors import RequestError
from ...system.files import replacing, sync_directory


class Written(NamedTuple):
    """The position of an answer's line in the file, in bytes, and whether the row failed."""

    place: int
    size: int
    failed: bool


class Journal:
    """The output of one batch, locked against other processes. Thread-safe.

    ``done`` maps row keys to the answers written. Raises ``RequestError`` where another process writes the file, or it
    has content that is no answer to these rows; ``OSError`` where it cannot be written.
    """

    def __init__(self, file: Path, keys: Iterable[str]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.done: dict[str, Written] = {}
        self.usage = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        self._descriptor = _open(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_directory(file.absolute().parent)
            self._size = self._read(frozenset(keys))
            os.ftruncate(self._descriptor, self._size)
        except BlockingIOError:
            os.close(self._descriptor)
            raise RequestError("another process is writing it") from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read(self, keys: frozenset[str]) -> int:
        """Read the complete lines and return their size in bytes."""
        size, number = 0, 0
        with open(self._descriptor, "rb", closefd=False) as stream:
            for text in stream:
                number += 1
                if not text.endswith(b"\n"):
                    break
                key, answer = self._answer(text, number)
                if key not in keys:
                    raise RequestError(
                        f"line {number} does not answer a row of this input, which has changed or is a different one; "
                        "use another output file"
                    )
                self._note(key, size, len(text), answer)
                size += len(text)
        return size

    def _answer(self, text: bytes, number: int) -> tuple[str, dict[str, Any]]:
        try:
            found = json.loads(text)
            key = found["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            found = key = None
        if key is None or not {"custom_id", "response", "error"} <= found.keys():
            raise RequestError(f"line {number} is not an answer of a batch; use another output file")
        return str(key), found

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer, which is on the disk when this returns. Raises ``OSError``; then nothing of it stays."""
        text = json.dumps(answer).encode() + b"\n"
        with self._lock:
            try:
                self._append(text)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
            self._note(answer["id"], self._size, len(text), answer)
            self._size += len(text)

    def _append(self, text: bytes) -> None:
        place, rest = self._size, memoryview(text)
        while rest:
            count = os.pwrite(self._descriptor, rest, place)
            place, rest = place + count, rest[count:]
        os.fdatasync(self._descriptor)

    def _note(self, key: str, place: int, size: int, answer: dict[str, Any]) -> None:
        self.done[key] = Written(place, size, answer["error"] is not None)
        usage = ((answer["response"] or {}).get("body") or {}).get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[name] += usage.get(name) or 0
        self.usage["cached_tokens"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def put_in_order(self, keys: Iterable[str]) -> None:
        """Rewrite the file in the order of ``keys``, with the last line of each row.

        Raises ``OSError``; the file is unchanged then.
        """
        entries = [self.done[key] for key in keys]
        if [entry.place for entry in entries] == _starts(entries) and sum(e.size for e in entries) == self._size:
            return
        mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        with replacing(self._file, suffix=".ordered", mode=mode) as target:
            for entry in entries:
                target.write(os.pread(self._descriptor, entry.size, entry.place))
            target.flush()
            os.fsync(target.fileno())
        sync_directory(self._file.absolute().parent)

    @property
    def failed(self) -> int:
        return sum(entry.failed for entry in self.done.values())

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1  # a thread that comes late writes nowhere
            os.close(descriptor)


def _open(file: Path, flags: int) -> int:
    """Raise ``RequestError`` for what is no regular file, ``OSError`` where it cannot be opened."""
    try:
        descriptor = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RequestError("it is a symbolic link; name the file itself") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RequestError("it is not a regular file, so a restart could not read it")
    return descriptor


def _starts(entries: list[Written]) -> list[int]:
    starts, place = [], 0
    for entry in entries:
        starts.append(place)
        place += entry.size
    return starts
