"""The end of an engine that was asked to end: what runs has its time first."""

from __future__ import annotations

import time


class Drain:
    """``seconds`` are what requests have from the first ``begin`` on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    @property
    def under_way(self) -> bool:
        """Not where no time is given: who asks for something just then waits for the engine's successor."""
        return self._until is not None and time.monotonic() < self._until

    def begin(self, *, at_once: bool = False) -> None:
        """Asking again changes nothing, but for ``at_once``."""
        if at_once or self._until is None:
            self._until = time.monotonic() + (0.0 if at_once else self._seconds)

    def over(self, busy: bool) -> bool:
        return self._until is not None and (not busy or time.monotonic() >= self._until)
