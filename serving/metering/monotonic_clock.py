"""The monotonic clock of rate windows and reserves: seconds since the epoch that never step."""

from __future__ import annotations

import time
from collections.abc import Callable


def since_boot() -> float:
    """Seconds since the machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class MonotonicClock:
    """Starts at the wall clock's time and goes on by ``monotonic``: a minute takes a minute even when the wall clock is
    set. Where other processes of the store are ahead it moves up to them (a hybrid logical clock), for a window's
    newest slot may be theirs."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = since_boot) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        return self._monotonic() + self._offset

    def move_up_to(self, time: float) -> None:
        """Be no earlier than ``time``, which another process has seen.

        Lock-free for gevent's sake: of two calls at once one may be lost, and is made again at the next admission.
        """
        self._offset = max(self._offset, time - self._monotonic())
