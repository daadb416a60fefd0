"""How long torch's OpenMP threads spin when they wait, changed while they run.

libgomp, which torch's wheels for Linux bring along, spins for milliseconds by default, which is best alone: torch's
own kernels are many short parallel regions. Where there are more threads than processors it spins a thousandth of that
(GOMP_SPINCOUNT in its manual), and it counts for every wait anew. So a thread of ours that has a team of its own, which
sleeps, makes all others wait briefly for as long as it lives. libomp has a function for it.
"""

from __future__ import annotations

import ctypes
import os
import threading

import torch  # noqa: F401 - brings the runtime

DEFAULT_BLOCKTIME = 200  # milliseconds, of libomp


class Waiting:
    """Of this process's OpenMP. Where OMP_WAIT_POLICY or GOMP_SPINCOUNT says how to wait, it stays so."""

    def __init__(self) -> None:
        self.brief = False
        self._lock = threading.Lock()
        self._end: threading.Event | None = None
        self._runtime = ctypes.CDLL(None)
        self._asked = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))

    def set_brief(self, brief: bool) -> None:
        """Sleep almost at once instead of spinning, or as the runtime does by default."""
        with self._lock:
            if brief == self.brief or self._asked:
                return
            self.brief = brief
            if hasattr(self._runtime, "kmp_set_blocktime"):
                self._runtime.kmp_set_blocktime(0 if brief else DEFAULT_BLOCKTIME)
            elif hasattr(self._runtime, "GOMP_parallel"):
                self._crowd(brief)

    def _crowd(self, brief: bool) -> None:
        if not brief:
            assert self._end is not None
            self._end.set()  # its team ends with the thread
            return
        started, self._end = threading.Event(), threading.Event()
        threading.Thread(target=self._hold_team, args=(started, self._end), name="openmp-crowd", daemon=True).start()
        started.wait()

    def _hold_team(self, started: threading.Event, end: threading.Event) -> None:
        """A team of as many threads as there are processors, which has nothing to do."""
        idle = ctypes.cast(self._runtime.omp_get_thread_num, ctypes.c_void_p)
        self._runtime.GOMP_parallel(idle, None, ctypes.c_uint(len(os.sched_getaffinity(0))), ctypes.c_uint(0))
        started.set()
        end.wait()


waiting = Waiting()
