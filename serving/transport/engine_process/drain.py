"""Graceful shutdown: running requests get ``drain_timeout`` seconds before the engine ends."""

from __future__ import annotations

import time


class Drain:
    """The state of a shutdown. Running requests get ``seconds``, counted from the first ``begin``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._until is not None

    @property
    def under_way(self) -> bool:
        """Whether new requests are refused. Without a drain time they are not: they wait for the engine's successor."""
        return self._until is not None and time.monotonic() < self._until

    def begin(self, *, at_once: bool = False) -> None:
        """Start the shutdown. Another call changes nothing unless it has ``at_once``."""
        if at_once or self._until is None:
            self._until = time.monotonic() + (0.0 if at_once else self._seconds)

    def over(self, busy: bool) -> bool:
        """Return whether the engine has to end now; ``busy`` says that requests still run."""
        return self._until is not None and (not busy or time.monotonic() >= self._until)
