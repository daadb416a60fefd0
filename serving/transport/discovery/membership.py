"""A client's registration with an engine: a held lock file in the engine's state directory."""

from __future__ import annotations

import time

import psutil

from ...system.file_locks import FileLock
from .state_directory import Sleep, StateDirectory

POLL_SECONDS = 0.03
END_SECONDS = 2.0


class Membership:
    """The registration of one client. Owned by one thread."""

    def __init__(self, state: StateDirectory, client_id: str, sleep: Sleep) -> None:
        self._state, self._client_id, self._sleep = state, client_id, sleep
        self._lock: FileLock | None = None

    def join(self) -> None:
        """Register the client, again if the directory was recreated. The caller holds the directory's lock."""
        if self._lock is None or not self._lock.is_current:
            self._release()
            self._lock = self._state.register_client(self._client_id)

    def leave(self) -> None:
        """Unregister the client, and remove the files of an ended engine if no other client uses them."""
        self._release()
        deadline = time.monotonic() + END_SECONDS
        while not self._is_settled() and time.monotonic() < deadline:
            self._sleep(POLL_SECONDS)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release(unlink=self._lock.is_current)
            self._lock = None

    def _is_settled(self) -> bool:
        """Return whether a live engine will clean up, or nothing is left to clean up."""
        if self._state.engine_alive:
            return not self._is_ending()
        return self._state.remove_if_abandoned()

    def _is_ending(self) -> bool:
        """Return whether the engine has reported a failure or was killed.

        Such an engine keeps its lock for a moment, but no longer cleans up.
        """
        status = self._state.read_status()
        return status is not None and (status.state == "failed" or (status.pid > 0 and _is_ended(status.pid)))


def _is_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True
