"""What has not changed for a while, by this process's own clock.

Times that others wrote down say nothing once a clock was set; that nothing new was written for a minute does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Silence:
    """Shown the same things again and again, it says which of them have been as they are for ``seconds``."""

    def __init__(self, seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._monotonic = seconds, monotonic
        self._since: dict[str, tuple[object, float]] = {}

    def of(self, seen: Mapping[str, object]) -> list[str]:
        """The names under which nothing has changed; what is not in ``seen`` is forgotten."""
        now, known = self._monotonic(), self._since
        self._since = {
            name: known[name] if name in known and known[name][0] == value else (value, now)
            for name, value in seen.items()
        }
        return [name for name, (_, since) in self._since.items() if now - since >= self._seconds]
