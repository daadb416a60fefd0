"""How long the parts of an engine process's start took, by the clock and of this process's processor time."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class StartTimes:
    """``done(part)`` ends a part that began where the one before it ended, the first one with the process itself: made
    before it forks into the background, where processor time is counted from 0 again."""

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
        return ", ".join(f"{part} {wall:.2f} s ({used:.2f} s of processor time)" for part, (wall, used) in parts)


def _age() -> float:
    """Seconds since this process began: field 22 of its stat (proc(5)); 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0
