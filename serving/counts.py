"""An engine process's counters in a memory-mapped file that outlives it: exact however and whenever it dies.

::

    <root>/<engine>    a memory-mapped 8-byte count for each of ``COUNTERS``

A server names ``<root>`` in its ``Hello``; only the engine writes there, after every step and before the step's events
are sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

COUNTERS = (
    "steps", "prefix_hit_tokens", "prefix_query_tokens", "generated_tokens", "draft_tokens", "accepted_tokens",
)  # fmt: skip
_BYTES = 8 * len(COUNTERS)


class CountsFile:
    """The engine's side: file ``name`` in ``root``. Raises ``FileNotFoundError`` where ``root`` is gone."""

    def __init__(self, root: Path, name: str) -> None:
        fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BYTES)  # a hole met on a full disk would be a SIGBUS
            self._map = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    def put(self, counts: Sequence[int]) -> None:
        """Store ``counts``, in the order of ``COUNTERS``."""
        for place, count in enumerate(counts):
            self._words[place] = count

    def close(self) -> None:
        self._words.release()
        self._map.close()


def read_counts(root: Path) -> dict[str, tuple[int, ...]]:
    """The values of ``COUNTERS`` by engine; {} where there is no ``root``."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(root.iterdir()):
            data = path.read_bytes()
            if len(data) == _BYTES:  # else it is just being made
                found[path.name] = struct.unpack(f"={len(COUNTERS)}q", data)
    return found
