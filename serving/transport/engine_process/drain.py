"""Graceful shutdown: requests that run get ``drain_timeout`` seconds before the engine ends."""

from __future__ import annotations

import time


class Drain:
    """The state of a shutdown. Requests get ``seconds`` from the first ``begin`` on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._until is not None

    @property
    def under_way(self) -> bool:
        """Whether new requests are refused. Not where no time is given: those wait for the engine's successor."""
        return self._until is not None and time.monotonic() < self._until

    def begin(self, *, at_once: bool = False) -> None:
        """Start the shutdown. Calling it again changes nothing, but for ``at_once``."""
        if at_once or self._until is None:
            self._until = time.monotonic() + (0.0 if at_once else self._seconds)

    def over(self, busy: bool) -> bool:
        """Whether the engine is to end now; ``busy``: requests still run."""
        return self._until is not None and (not busy or time.monotonic() >= self._until)
