"""Simulated hosts and the processes on them: clocks, descriptors, and what an end leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .disk import Disk
from .scheduler import Scheduler


class Host:
    """A host: a clock on the wall that can be wrong, one since its start that cannot, a disk, a way to the database.

    ``wall_ahead`` is by how many seconds the wall clock is ahead of the true time. Until ``cut_until``, its processes
    do not reach the database.
    """

    def __init__(self, name: str, root: Path, scheduler: Scheduler) -> None:
        self.name = name
        self.disk = Disk(root, scheduler.draw)
        self.state = root / "state"
        self.wall_ahead = 0.0
        self.cut_until = 0.0
        self.boots = 0
        self.was_cut_off_power = False
        self._scheduler = scheduler
        self._started = scheduler.now - 1000.0
        self.state.mkdir(parents=True)
        self.disk.sync(root)

    @property
    def boot_id(self) -> str:
        return f"{self.name}-{self.boots}"

    def wall(self) -> float:
        return self._scheduler.now + self.wall_ahead

    def since_boot(self) -> float:
        return self._scheduler.now - self._started

    def lose_power(self) -> None:
        """Keep of the disk what was synced, and some of the rest; the processes have been killed before."""
        self.disk.lose_power()
        self.boots += 1
        self.was_cut_off_power = True
        self._started = self._scheduler.now


class Process:
    """A simulated process. Its end releases what the kernel would: descriptors with their locks, and connections."""

    def __init__(self, name: str, host: Host, pid: int) -> None:
        self.name = name
        self.host = host
        self.pid = pid
        self.is_alive = True
        self.stopped_until = 0.0
        self.descriptors: set[int] = set()
        self.at_end: list[Callable[[], object]] = []
        self.program: Any = None

    def kill(self) -> None:
        self.is_alive = False
        for descriptor in sorted(self.descriptors):
            os.close(descriptor)
        self.descriptors.clear()
        for end in self.at_end:
            end()
        self.at_end.clear()
