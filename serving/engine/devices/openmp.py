"""Change at run time how long torch's OpenMP threads spin while they wait.

libgomp comes with torch's wheels for Linux. By default it spins for milliseconds, which is best when torch has the
machine to itself: its own kernels are many short parallel regions. When there are more threads than CPUs, libgomp
spins for a thousandth of that (see GOMP_SPINCOUNT in its manual), and it counts the threads again at every wait. So one
thread of ours that holds a sleeping team makes all other threads wait briefly for as long as it lives. libomp has a
function for this.
"""

from __future__ import annotations

import ctypes
import os
import threading

import torch  # noqa: F401 - loads the OpenMP runtime

DEFAULT_BLOCKTIME_MS = 200  # milliseconds; libomp's default


class Waiting:
    """The way in which this process's OpenMP threads wait.

    Nothing is changed if the environment says how to wait: by OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME.
    """

    def __init__(self) -> None:
        self.brief = False
        self._lock = threading.Lock()
        self._end: threading.Event | None = None
        self._runtime = ctypes.CDLL(None)
        self.asked = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))

    def set_brief(self, brief: bool) -> None:
        """Let waiting threads sleep almost at once (``brief``), or spin as the runtime does by default."""
        with self._lock:
            if brief == self.brief or self.asked:
                return
            self.brief = brief
            if hasattr(self._runtime, "kmp_set_blocktime"):
                self._runtime.kmp_set_blocktime(0 if brief else DEFAULT_BLOCKTIME_MS)
            elif hasattr(self._runtime, "GOMP_parallel"):
                self._crowd(brief)

    def _crowd(self, brief: bool) -> None:
        if not brief:
            assert self._end is not None
            self._end.set()  # the team ends with its thread
            return
        started, self._end = threading.Event(), threading.Event()
        threading.Thread(target=self._hold_team, args=(started, self._end), name="openmp-crowd", daemon=True).start()
        started.wait()

    def _hold_team(self, started: threading.Event, end: threading.Event) -> None:
        """Hold a team that has nothing to do, of as many threads as there are CPUs."""
        idle = ctypes.cast(self._runtime.omp_get_thread_num, ctypes.c_void_p)
        self._runtime.GOMP_parallel(idle, None, ctypes.c_uint(len(os.sched_getaffinity(0))), ctypes.c_uint(0))
        started.set()
        end.wait()


waiting = Waiting()
