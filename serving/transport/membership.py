"""A client's place among the clients of one engine: registered by a held lock, left with nothing behind."""

from __future__ import annotations

import time

import psutil

from .locks import FileLock
from .rundir import Sleep, StateDir

POLL_INTERVAL = 0.03
END_TIMEOUT = 2.0


class Membership:
    """Owned by one thread."""

    def __init__(self, state: StateDir, client_id: str, sleep: Sleep) -> None:
        self._state, self._client_id, self._sleep = state, client_id, sleep
        self._lock: FileLock | None = None

    def join(self) -> None:
        """Under the engine's lock: register, anew where the directory was made again since."""
        if self._lock is None or not self._lock.is_current:
            self._release()
            self._lock = self._state.register_client(self._client_id)

    def leave(self) -> None:
        """Unregister, and remove what a killed engine left if nobody else lives to use it."""
        self._release()
        self._await_last_thread()
        if not self._state.engine_alive:
            self._state.remove_if_abandoned()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release(unlink=self._lock.is_current)
            self._lock = None

    def _await_last_thread(self) -> None:
        """An engine that was killed just now keeps its lock until its last thread is gone; it will clean up no more."""
        deadline = time.monotonic() + END_TIMEOUT
        status = self._state.read_status()
        while status is not None and status.pid > 0 and _is_ended(status.pid) and self._state.engine_alive:
            if time.monotonic() > deadline:
                return
            self._sleep(POLL_INTERVAL)


def _is_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True
