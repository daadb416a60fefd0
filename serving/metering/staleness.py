"""Staleness by this process's own clock: values of other processes that have stopped changing.

Timestamps of other hosts prove nothing where a clock was set; that nothing new was written for a minute does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class StalenessDetector:
    """Notices values that have not changed for ``seconds``, over repeated calls of ``observe``."""

    def __init__(self, seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._monotonic = seconds, monotonic
        self._since: dict[str, tuple[object, float]] = {}

    def observe(self, seen: Mapping[str, object]) -> list[str]:
        """Take the values in and return the names of those that are stale; names not in ``seen`` are forgotten."""
        now, known = self._monotonic(), self._since
        self._since = {
            name: known[name] if name in known and known[name][0] == value else (value, now)
            for name, value in seen.items()
        }
        return [name for name, (_, since) in self._since.items() if now - since >= self._seconds]
