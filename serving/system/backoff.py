"""Exponential backoff: how long to wait before retrying something that has failed."""

from __future__ import annotations

import random


class Backoff:
    """Pauses in seconds: ``first``, then each twice as long as the one before, up to ``max_pause``. Not thread-safe.

    ``at_once`` puts a pause of 0 before the first. ``jitter`` is the range of a random factor for each pause, so that
    clients that failed together do not come back together.
    """

    __slots__ = ("_first", "_jitter", "_max_pause", "pause")

    def __init__(
        self, first: float, max_pause: float, *, at_once: bool = False, jitter: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self._first, self._max_pause, self._jitter = first, max_pause, jitter
        self.pause = 0.0 if at_once else first
        """The pause that ``failed`` returns next, without jitter."""

    def failed(self) -> float:
        """Return the seconds to wait now; the next pause is longer."""
        pause = self.pause
        self.pause = min(max(self._first, 2 * pause), self._max_pause)
        return pause * random.uniform(*self._jitter)

    def succeeded(self, *, at_once: bool = False) -> None:
        """Start over with the first pause; ``at_once`` is as for a new object."""
        self.pause = 0.0 if at_once else self._first
