"""An engine process's counters in a memory-mapped file that outlives it: exact no matter how or when it dies.

::

    <root>/<engine>    a memory-mapped 8-byte count for each of ``COUNTERS``

A server names ``<root>`` in its ``Hello``. Only the engine writes there, after every step and before it sends the
step's events.
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
    """The engine's side: file ``name`` in ``root``. Raises ``FileNotFoundError`` if ``root`` is gone."""

    def __init__(self, root: Path, name: str) -> None:
        fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BYTES)  # on a full disk, writing to a hole would raise SIGBUS
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
    """Return the values of ``COUNTERS`` by engine; {} if there is no ``root``."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(root.iterdir()):
            data = path.read_bytes()
            if len(data) == _BYTES:  # otherwise it is just being created
                found[path.name] = struct.unpack(f"={len(COUNTERS)}q", data)
    return found
