"""Starting an engine again, but not as fast as it can crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..transport.discovery.launcher import Launcher

TURN = 0.05  # seconds between looks whether to go on waiting
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
HEALTHY_LIFE = 2.0  # seconds; an engine that lived so long is started again at once


class Backoff:
    """Pauses between starts: none before the first and after a healthy life, else doubling."""

    def __init__(self) -> None:
        self._pause = 0.0

    def died_after(self, seconds: float) -> float:
        """The seconds to wait before the next start."""
        if seconds >= HEALTHY_LIFE:
            self._pause = 0.0
            return 0.0
        pause, self._pause = self._pause, min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        return pause


class BackoffLauncher(Launcher):
    """A launcher that does not start a crashing engine as fast as it can crash."""

    def __init__(self, *args: Any, over: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._over = over
        self._backoff = Backoff()
        self._has_looked = False
        self._found_at: float | None = None  # by the last search; None where it found nothing, however long it took

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        def ended() -> bool:
            return self._over() or cancelled()

        if self._has_looked:
            lived = 0.0 if self._found_at is None else time.monotonic() - self._found_at
            until = time.monotonic() + self._backoff.died_after(lived)
            while time.monotonic() < until and not ended():
                time.sleep(TURN)
        self._has_looked, self._found_at = True, None
        found = super().find(stalled, ended)
        self._found_at = time.monotonic()
        return found
