"""The CPUs that this process may use, by CPU affinity and by the CPU quota of its control groups.

A quota is ``cpu.max`` of cgroup v2 or ``cpu.cfs_quota_us`` of v1, for the process's own group and for every visible
group above it; the smallest applies. This module must not import torch: it is used before torch is loaded.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from .control_groups import PROC, groups

CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class AvailableCpus:
    """CPUs ``allowed`` by affinity, their number of physical ``cores``, and the ``quota`` (None: no limit)."""

    allowed: int
    cores: int
    quota: float | None

    @property
    def threads(self) -> int:
        """The number of compute threads: one per physical core, but no more than the quota can keep running."""
        return self.cores if self.quota is None else max(1, min(self.cores, math.ceil(self.quota)))

    def __str__(self) -> str:
        quota = "" if self.quota is None else f", a quota of {self.quota:g}"
        return f"{self.allowed} usable on {self.cores} cores{quota}"


def available_cpus(proc: Path = PROC, cpus: Path = CPUS) -> AvailableCpus:
    allowed = affinity()
    return AvailableCpus(allowed=len(allowed), cores=_cores(allowed, cpus), quota=quota(proc))


def num_threads() -> int:
    """Return the number of threads for this process: OMP_NUM_THREADS if it is a number, else
    ``AvailableCpus.threads``."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else available_cpus().threads


def quota(proc: Path = PROC) -> float | None:
    """Return the CPU time that the control groups allow this process, in CPUs; None if they set no limit."""
    return min((found for group in groups("cpu", proc) if (found := _group_quota(group)) is not None), default=None)


def _group_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            maximum, period = (group / "cpu.max").read_text().split()
        else:
            maximum, period = ((group / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(maximum) / int(period) if maximum != "max" and int(maximum) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # the root group has no such file, nor does a group whose controller is off
        return None


def affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cores(allowed: frozenset[int], cpus: Path) -> int:
    """Count the physical cores of the ``allowed`` CPUs: siblings on one core count once."""
    found = set()
    for cpu in allowed:
        try:
            found.add((cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return max(1, min(len(allowed), psutil.cpu_count(logical=False) or len(allowed)))
    return max(1, len(found))
