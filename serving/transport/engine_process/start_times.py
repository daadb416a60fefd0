"""How long the parts of an engine process's start took, in elapsed time and in CPU time."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class StartTimes:
    """The times of the parts of a start. ``done(part)`` ends a part, which began when the part before it ended.

    The first part began with the process. Make this object before the process forks into the background: a forked
    child counts its CPU time from 0 again.
    """

    def __init__(self) -> None:
        self._at = time.monotonic() - _age()
        self._used = -time.process_time()
        self.parts: dict[str, tuple[float, float]] = {}

    def done(self, part: str) -> None:
        now, used = time.monotonic(), time.process_time()
        self.parts[part] = (now - self._at, used - self._used)
        self._at, self._used = now, used

    def __str__(self) -> str:
        parts = [*self.parts.items(), ("in all", tuple(map(sum, zip(*self.parts.values(), strict=True))))]
        return ", ".join(f"{part} {wall:.2f} s ({used:.2f} s of CPU time)" for part, (wall, used) in parts)


def _age() -> float:
    """Return the seconds since this process began, from field 22 of its stat file (proc(5)); 0 if that is unknown."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0
