"""Detection of ended processes, also of those that are never waited for.

A process whose parent died belongs to PID 1, and in many a container PID 1 never asks for its exit status: it stays a
zombie, which ``psutil.pid_exists`` and ``psutil.wait_procs`` take for alive."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def gone(process: psutil.Process | int) -> bool:
    """Return whether a process has released everything: a dying one loses its command line before its locks, and a
    zombie whose threads are still ending still has its ports."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        if not found.is_running() or found.status() == psutil.STATUS_DEAD:
            return True
        return found.status() == psutil.STATUS_ZOMBIE and found.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def alive_after(processes: Iterable[psutil.Process | int], seconds: float = 240) -> list[psutil.Process | int]:
    """Return the processes that have not ended within ``seconds``, as soon as all have ended."""
    end = time.monotonic() + seconds
    left = list(processes)
    while (left := [process for process in left if not gone(process)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left
