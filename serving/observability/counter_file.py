"""prometheus_client's memory-mapped file of counters, with disk space reserved for the whole file.

The library creates sparse files. A write into a hole when the disk is full (for example a ``/tmp`` in memory) causes a
SIGBUS, which ends the process. Here a counter without space is kept in memory, and no scrape sees it until there is
space.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable
from typing import Any

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

log = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 16  # the first size that the library maps; then it doubles the size repeatedly
_ENTRY_BYTES = 4 + 8 + 16  # of a counter in addition to its name: the name's length, padding, value and time


class CounterFile:
    """A replacement of ``MmapedDict`` for writers. Not thread-safe; neither is ``MmapedDict``."""

    _warned = False  # warn once per process

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._file: MmapedDict | None = None
        self._homeless: dict[str, tuple[float, float]] = {}

    def read_value(self, key: str) -> tuple[float, float]:
        """Return the value and time of a counter; both are 0 for a new one."""
        if self.has_room([key]):
            found: tuple[float, float] = self._file.read_value(key)  # type: ignore[union-attr]
            return found
        return self._homeless.get(key, (0.0, 0.0))

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set a counter."""
        if (self._file is not None and key in self._file._positions) or self.has_room([key]):
            self._file.write_value(key, value, timestamp)  # type: ignore[union-attr]
            self._homeless.pop(key, None)
        else:
            self._homeless[key] = value, timestamp

    def has_room(self, keys: Iterable[str]) -> bool:
        """Return whether the file has all of ``keys`` or space for them; the space is then reserved."""
        try:
            if self._file is None:
                self._make()
                self._file = MmapedDict(self._filename)  # type: ignore[no-untyped-call]
            new = [key for key in keys if key not in self._file._positions]
            wanted = self._file._used + sum(len(key.encode()) + _ENTRY_BYTES for key in new)
            while self._file._capacity < wanted:
                self._grow(self._file)
        except OSError as error:
            if not CounterFile._warned:
                CounterFile._warned = True
                log.warning("no room for figures in %s: /metrics lacks some (%s)", self._filename, error.strerror)
            return False
        return True

    @staticmethod
    def _grow(file: Any) -> None:
        os.posix_fallocate(file._f.fileno(), file._capacity, file._capacity)
        file._capacity *= 2
        file._m = mmap.mmap(file._f.fileno(), file._capacity)

    def _make(self) -> None:
        """Create the file if it does not exist, atomically, so that a scrape sees no partial file.

        Raises ``OSError``.
        """
        if os.path.exists(self._filename):
            return
        making = f"{self._filename}.new"
        fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _FIRST_BYTES)
            os.rename(making, self._filename)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(making)
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # type: ignore[no-untyped-call]
        self._file = None


values.MmapedDict = CounterFile  # type: ignore[assignment, attr-defined]  # the library's counters write into it
