"""Seconds since the epoch that never step: what rate windows and reserves are counted by."""

from __future__ import annotations

import time
from collections.abc import Callable


def since_boot() -> float:
    """As ``time.monotonic``, the time in which the machine sleeps included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """Begins at the wall clock's time and goes on by a monotonic one, so that a minute takes a minute whatever happens
    to the wall clock. Where others that share the store are ahead it moves up to them and stays there (a hybrid logical
    clock): else this process's seconds would stand still until they come to the others'."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = since_boot) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        return self._monotonic() + self._offset

    def move_up_to(self, time: float) -> None:
        """Others have seen ``time`` already. Without a lock, for threads under gevent: of two at once the later may be
        lost, and is seen again."""
        self._offset = max(self._offset, time - self._monotonic())
