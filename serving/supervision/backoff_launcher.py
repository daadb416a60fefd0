"""Restart an engine, but not as fast as it can crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..system.backoff import Backoff
from ..transport.discovery.launcher import Launcher

CHECK_SECONDS = 0.05  # seconds between checks whether to continue waiting
FIRST_PAUSE, MAX_PAUSE = 0.25, 30.0  # seconds
HEALTHY_SECONDS = 2.0  # seconds; an engine that lived so long is restarted at once


class BackoffLauncher(Launcher):
    """A launcher that waits before it restarts an engine that has just crashed; it stops waiting once ``over()``."""

    def __init__(self, *args: Any, over: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._over = over
        self._backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, at_once=True)
        self._has_looked = False
        self._found_at: float | None = None  # when the last search found an engine; None if it found none

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        def ended() -> bool:
            return self._over() or cancelled()

        if self._has_looked:
            until = time.monotonic() + self._pause()
            while time.monotonic() < until and not ended():
                time.sleep(CHECK_SECONDS)
        self._has_looked, self._found_at = True, None
        found = super().find(stalled, ended)
        self._found_at = time.monotonic()
        return found

    def _pause(self) -> float:
        """Return the seconds to wait before the next start."""
        if self._found_at is not None and time.monotonic() - self._found_at >= HEALTHY_SECONDS:
            self._backoff.succeeded(at_once=True)
            return 0.0
        return self._backoff.failed()
