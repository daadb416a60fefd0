"""Detect, by this process's own clock, values of other processes that have stopped changing.

Timestamps of other hosts prove nothing if a clock was set; it does prove something if nothing new was written for a
minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class StalenessDetector:
    """A detector of values that have not changed for ``seconds``, over repeated calls of ``observe``."""

    def __init__(self, seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._monotonic = seconds, monotonic
        self._since: dict[str, tuple[object, float]] = {}

    def observe(self, seen: Mapping[str, object]) -> list[str]:
        """Record the values and return the names of those that are stale; names not in ``seen`` are forgotten."""
        now, known = self._monotonic(), self._since
        self._since = {
            name: known[name] if name in known and known[name][0] == value else (value, now)
            for name, value in seen.items()
        }
        return [name for name, (_, since) in self._since.items() if now - since >= self._seconds]
