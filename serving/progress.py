"""Token counts of in-flight requests in a memory-mapped file: written in a microsecond, and still there after the
process was killed (the kernel owns the pages; only a crash of the machine can lose the last seconds).

::

    slot (288 bytes)   0  id length │ 8  id, UTF-8, zero padded (256) │ 264 prompt │ 272 cached │ 280 completion
    segment            1024 slots; the file grows by segments

Each count is one aligned 8-byte store, so a reader after a kill never sees half a number. The id's length is written
last when a slot is taken and first when it is given back.
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
_SLOT = 288
_WORDS = _SLOT // 8
_PER_SEGMENT = 1024
_SEGMENT = _SLOT * _PER_SEGMENT  # a multiple of 4096: segments begin on a page


class Progress(Struct, frozen=True, kw_only=True):
    """A request's slot: tokens of the prompt, those of them found in the cache, tokens of the completion."""

    request_id: str
    prompt: int
    cached: int
    completion: int


class ProgressFile:
    """The writer's side: one process, many threads; each slot belongs to one request. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        self._free: list[int] = []

    def take(self, request_id: str) -> int:
        """A slot for ``request_id`` with counts 0."""
        slot = self.hold()
        self.begin(slot, request_id)
        return slot

    def hold(self) -> int:
        """A slot that is still nobody's, so that there is room for whoever it will be."""
        with self._lock:
            if not self._free:
                self._grow()
            return self._free.pop()

    def begin(self, slot: int, request_id: str) -> None:
        """Give the ``slot`` that was held to ``request_id``, with counts 0."""
        encoded = request_id.encode()
        assert 0 < len(encoded) <= MAX_ID
        segment, index = divmod(slot, _PER_SEGMENT)
        start = index * _SLOT
        self._maps[segment][start + 8 : start + _SLOT] = encoded.ljust(MAX_ID, b"\0") + bytes(24)
        self._words[segment][index * _WORDS] = len(encoded)

    def put(self, slot: int, prompt: int, cached: int, completion: int) -> None:
        """Store the token counts of ``slot``."""
        segment, index = divmod(slot, _PER_SEGMENT)
        words, at = self._words[segment], index * _WORDS
        words[at + 33] = prompt
        words[at + 34] = cached
        words[at + 35] = completion

    def give_back(self, slot: int) -> None:
        """Free ``slot``: its request has ended."""
        segment, index = divmod(slot, _PER_SEGMENT)
        self._words[segment][index * _WORDS] = 0
        with self._lock:
            self._free.append(slot)

    def _grow(self) -> None:
        number = len(self._maps)
        os.posix_fallocate(self._fd, number * _SEGMENT, _SEGMENT)  # a hole met on a full disk would be a SIGBUS
        self._maps.append(mmap.mmap(self._fd, _SEGMENT, offset=number * _SEGMENT))
        self._words.append(memoryview(self._maps[-1]).cast("q"))
        first = number * _PER_SEGMENT
        self._free.extend(range(first + _PER_SEGMENT - 1, first - 1, -1))

    def close(self) -> None:
        for words, mapped in zip(self._words, self._maps, strict=True):
            words.release()
            mapped.close()
        self._words, self._maps, self._free = [], [], []
        os.close(self._fd)


def read_progress(path: Path) -> list[Progress]:
    """Every slot in use in the file that a dead process left; [] where there is none. Raises ``OSError``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for start in range(0, len(data) - _SLOT + 1, _SLOT):
        (length,) = struct.unpack_from("=q", data, start)
        if 0 < length <= MAX_ID:
            prompt, cached, completion = struct.unpack_from("=qqq", data, start + 8 + MAX_ID)
            request_id = data[start + 8 : start + 8 + length].decode(errors="replace")
            found.append(Progress(request_id=request_id, prompt=prompt, cached=cached, completion=completion))
    return found
