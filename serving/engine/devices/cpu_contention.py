"""Whether the engine gets the CPUs that its threads need, by how long its thread waited for one.

Three things keep a runnable thread from running. The worst of them, in a window of a second or more, counts:

- others on the same CPUs (the run queue: /proc/thread-self/schedstat);
- the quota of a control group (its cpu.stat);
- the host of a virtual machine ("steal" in /proc/stat).

An episode begins with a window in which the thread waited for a fifth of the time that it wanted to run. It ends when
the thread has run for ten seconds with hardly any waiting. Both are logged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...system.control_groups import PROC, groups
from ...system.cpus import quota

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 1.0  # seconds between looks
BEGIN_SHARE, END_SHARE = 0.2, 0.05  # shares of the time that the thread wanted to run
CALM_SECONDS = 10.0  # seconds below END_SHARE, in windows that say something, that end an episode
MIN_WANTED_SHARE = 0.05  # of a window; a thread that wants to run for less says nothing about the CPUs


@dataclass(frozen=True, slots=True)
class Readings:
    """Seconds since the start: ``ran`` and ``waited`` of the calling thread, ``throttled`` of its control groups, and
    ``stolen`` out of ``total`` on all CPUs. A value that the system does not report is 0."""

    ran: float = 0.0
    waited: float = 0.0
    throttled: float = 0.0
    stolen: float = 0.0
    total: float = 0.0


def read(proc: Path = PROC) -> Readings:
    """Read what the system has counted for this thread, its control group and the host so far."""
    ran, waited = _schedstat(proc)
    stolen, total = _steal(proc)
    throttled = max((_throttled(group) for group in groups("cpu", proc)), default=0.0)
    return Readings(ran=ran, waited=waited, throttled=throttled, stolen=stolen, total=total)


def _schedstat(proc: Path) -> tuple[float, float]:
    try:
        ran, waited, _ = (proc / "thread-self/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def _steal(proc: Path) -> tuple[float, float]:
    """Return stolen and total seconds, from ``cpu user nice system idle iowait irq softirq steal …`` in ticks of 10
    ms."""
    try:
        ticks = [int(part) for part in (proc / "stat").read_text().partition("\n")[0].split()[1:9]]
        return ticks[7] / 100, sum(ticks) / 100
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0


def _throttled(group: Path) -> float:
    try:
        found = dict(line.split(" ", 1) for line in (group / "cpu.stat").read_text().splitlines())
        if "throttled_usec" in found:
            return int(found["throttled_usec"]) / 1e6
        return int(found.get("throttled_time", 0)) / 1e9
    except (OSError, ValueError):
        return 0.0


class Contention:
    """A measure of how long the thread that made it waited for a CPU. Calls from other threads do nothing.

    ``changed(oversubscribed)`` is called when an episode begins or ends."""

    def __init__(
        self,
        changed: Callable[[bool], None] = lambda oversubscribed: None,
        *,
        readings: Callable[[], Readings] = read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.oversubscribed = False
        self.waiting = 0.0  # share of the time that the thread wanted to run in the last window
        self._changed, self._readings, self._clock = changed, readings, clock
        self._at, self._last = clock(), readings()
        self._began = self._calm = 0.0
        self._thread = threading.get_ident()

    def look(self) -> None:
        """Measure once a window has passed. Cheap; does nothing within a window."""
        now = self._clock()
        seconds = now - self._at
        if seconds < WINDOW_SECONDS or threading.get_ident() != self._thread:
            return
        before, found = self._last, self._readings()
        shares = _shares(before, found, seconds)
        self._at, self._last = now, found
        self.waiting = max(shares.values())
        if self.waiting >= END_SHARE:
            self._calm = 0.0
        elif found.ran - before.ran >= MIN_WANTED_SHARE * seconds:
            self._calm += seconds
        if not self.oversubscribed and self.waiting >= BEGIN_SHARE:
            self._began = now
            cause = max(shares, key=lambda name: shares[name])
            text = "CPUs are oversubscribed: %.0f %% of the time was spent waiting for one (%s)"
            logger.warning(text, 100 * self.waiting, _readable(cause))
        elif self.oversubscribed and self._calm >= CALM_SECONDS:
            logger.info("CPUs are free again after %.0f seconds", now - self._began)
        else:
            return
        self.oversubscribed = not self.oversubscribed
        self._changed(self.oversubscribed)


def _shares(before: Readings, after: Readings, seconds: float) -> dict[str, float]:
    ran, waited = after.ran - before.ran, after.waited - before.waited
    wanted, total = ran + waited, after.total - before.total
    enough = wanted >= MIN_WANTED_SHARE * seconds
    return {
        "others": waited / wanted if enough else 0.0,
        "quota": min(1.0, (after.throttled - before.throttled) / seconds),
        "host": (after.stolen - before.stolen) / total if total > 0 and enough else 0.0,
    }


def _readable(cause: str) -> str:
    if cause == "quota":
        return f"the control group's quota of {quota() or 0:g} CPUs is used up"
    if cause == "host":
        return "the host gives them to other machines"
    return f"others run on the {len(os.sched_getaffinity(0))} that it may use"
