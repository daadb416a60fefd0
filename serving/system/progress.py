"""Token counts of in-flight requests in a memory-mapped file.

A write takes a microsecond, and the counts survive a kill of the process: the kernel owns the pages, and only a crash
of the machine can lose the last seconds.

::

    slot (288 bytes)   0  id length │ 8  id, UTF-8, zero padded (256) │ 264 prompt │ 272 cached │ 280 completion
    segment            1024 slots; the file grows by segments

Each count is one aligned 8-byte store, so a reader never sees half a number after a kill. The length of the id is
written last when a slot is taken, and first when it is freed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path

from msgspec import Struct

MAX_ID = 256
"""Bytes."""
_SLOT_BYTES = 288
_SLOT_WORDS = _SLOT_BYTES // 8
_PER_SEGMENT = 1024
_SEGMENT_BYTES = _SLOT_BYTES * _PER_SEGMENT  # a multiple of 4096, so that segments begin on a page


class Progress(Struct, frozen=True, kw_only=True):
    """A request's slot: the tokens of its prompt, how many of those were cached, and the tokens of its completion."""

    request_id: str
    prompt: int
    cached: int
    completion: int


class ProgressFile:
    """The writer's side, for many threads of one process. Each slot belongs to one request. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        self.free: list[int] = []

    def take(self, request_id: str) -> int:
        """Take a slot for ``request_id``, with all counts 0, and return its number."""
        slot = self.hold()
        self.begin(slot, request_id)
        return slot

    def hold(self) -> int:
        """Reserve a slot for a request that is not known yet, so that it will have room."""
        with self._lock:
            if not self.free:
                self._grow()
            return self.free.pop()

    def begin(self, slot: int, request_id: str) -> None:
        """Assign the reserved ``slot`` to ``request_id``, with all counts 0."""
        encoded = request_id.encode()
        assert 0 < len(encoded) <= MAX_ID
        segment, index = divmod(slot, _PER_SEGMENT)
        start = index * _SLOT_BYTES
        self._maps[segment][start + 8 : start + _SLOT_BYTES] = encoded.ljust(MAX_ID, b"\0") + bytes(24)
        self._words[segment][index * _SLOT_WORDS] = len(encoded)

    def put(self, slot: int, prompt: int, cached: int, completion: int) -> None:
        """Store the token counts of ``slot``."""
        segment, index = divmod(slot, _PER_SEGMENT)
        words, at = self._words[segment], index * _SLOT_WORDS
        words[at + 33] = prompt
        words[at + 34] = cached
        words[at + 35] = completion

    def give_back(self, slot: int) -> None:
        """Free ``slot``: its request has ended. In a file that was closed it stays, as after a kill."""
        if not self._maps:
            return
        segment, index = divmod(slot, _PER_SEGMENT)
        self._words[segment][index * _SLOT_WORDS] = 0
        with self._lock:
            self.free.append(slot)

    def _grow(self) -> None:
        number = len(self._maps)
        os.posix_fallocate(
            self._fd, number * _SEGMENT_BYTES, _SEGMENT_BYTES
        )  # on a full disk, a write to a hole raises SIGBUS
        self._maps.append(mmap.mmap(self._fd, _SEGMENT_BYTES, offset=number * _SEGMENT_BYTES))
        self._words.append(memoryview(self._maps[-1]).cast("q"))
        first = number * _PER_SEGMENT
        self.free.extend(range(first + _PER_SEGMENT - 1, first - 1, -1))

    def close(self) -> None:
        for words, mapped in zip(self._words, self._maps, strict=True):
            words.release()
            mapped.close()
        self._words, self._maps, self.free = [], [], []
        fd, self._fd = self._fd, -1
        os.close(fd)


def read_progress(path: Path) -> list[Progress]:
    """Return every used slot in the file that a dead process left; [] if there is no file. Raises ``OSError``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for start in range(0, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES):
        (length,) = struct.unpack_from("=q", data, start)
        if 0 < length <= MAX_ID:
            prompt, cached, completion = struct.unpack_from("=qqq", data, start + 8 + MAX_ID)
            request_id = data[start + 8 : start + 8 + length].decode(errors="replace")
            found.append(Progress(request_id=request_id, prompt=prompt, cached=cached, completion=completion))
    return found
