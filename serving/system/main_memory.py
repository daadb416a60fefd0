"""The main memory that this process may use: the machine's, within its control groups' limits and its own.

A limit is ``memory.max`` of cgroup v2 or ``memory.limit_in_bytes`` of v1, for the process's own group and for every
visible group above it, and RLIMIT_AS (``ulimit -v``).
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from .control_groups import PROC, groups

V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Bytes: ``total`` is the machine's or the least limit, ``free`` what may still be used."""

    total: int
    free: int

    def __str__(self) -> str:
        return f"{self.free / 2**30:.1f} GiB free of {self.total / 2**30:.1f} GiB"


def main_memory(proc: Path = PROC) -> MainMemory:
    machine = psutil.virtual_memory()
    each = [MainMemory(int(machine.total), int(machine.available))]
    each += [found for group in groups("memory", proc) if (found := _of_group(group)) is not None]
    each += _of_process(proc)
    return MainMemory(min(one.total for one in each), max(min(one.free for one in each), 0))


def _of_group(group: Path) -> MainMemory | None:
    """Return the group's memory; the page cache counts as free, because the kernel gives it up before it refuses
    memory."""
    maximum, current, cached = V2 if (group / V2[0]).exists() else V1
    try:
        limit, used = int((group / maximum).read_text()), int((group / current).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit ("max"), as in the root group, or no such controller
        return None
    return MainMemory(limit, limit - used + sum(int(counts.get(name, 0)) for name in cached))


def _of_process(proc: Path) -> list[MainMemory]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int((proc / "self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    return [MainMemory(limit, limit - pages * os.sysconf("SC_PAGE_SIZE"))]
