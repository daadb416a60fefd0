"""The monotonic clock of rate windows and reserves: seconds since the epoch that never step."""

from __future__ import annotations

import time
from collections.abc import Callable


def since_boot() -> float:
    """Return the seconds since the machine was started, including time that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class MonotonicClock:
    """A clock that starts at the wall clock's time and advances by ``monotonic``.

    A minute thus takes a minute even if the wall clock is set. If other processes of the store are ahead, it moves up
    to them (a hybrid logical clock), since the newest slot of a window may be theirs; by no more than ``max_ahead``
    seconds if it ``follow``s the store's own clock.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = since_boot) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        self.max_ahead: float | None = None

    def now(self) -> float:
        return self._monotonic() + self._offset

    def follow(self, time: float, at: float, max_ahead: float) -> None:
        """Take over the store's ``time``, which it had when the monotonic clock said ``at``."""
        self._offset, self.max_ahead = time - at, max_ahead

    def is_beyond(self, time: float) -> bool:
        """Return whether only a wrong clock can have been at ``time`` already."""
        return self.max_ahead is not None and time > self.now() + self.max_ahead

    def move_up_to(self, time: float) -> None:
        """Move forward to ``time``, which another process has seen, if it is later.

        It takes no lock, because of gevent: one of two simultaneous calls may be lost, and is repeated at the next
        admission.
        """
        self._offset = max(self._offset, time - self._monotonic())
