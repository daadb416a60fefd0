"""Attach to an engine that is started elsewhere: by a supervisor on this host, or by an engine host on a network."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

from ...interface.errors import ShuttingDown, Unavailable
from ..auth import check_address, read_key
from .membership import Membership
from .state_directory import SOCKET, Sleep, StateDirectory, check_private

POLL_SECONDS = 0.03  # seconds
RETRY_SECONDS = 0.5  # seconds between connections to another host, so as not to flood one that refuses us
GRACE_SECONDS = 2.0  # seconds that the supervisor of a stalled engine has to replace it


class Attacher:
    """The ``Finder`` for an engine that a supervisor runs: it waits for the engine and never starts or kills one.

    ``address`` is a state directory on this host, or ``tcp://host:port`` with ``key_file``. ``timeout`` is how many
    seconds may pass without an engine; the time in which an engine is loading does not count.

    If the supervisor has not replaced a stalled engine within ``GRACE_SECONDS``, the client attaches to it again: it
    may have recovered. If it has not, it stalls again. Raises ``PackagingError`` for a bad address or key file.
    """

    def __init__(
        self, address: str, *, key_file: str | None = None, timeout: float = 60.0, sleep: Sleep = time.sleep
    ) -> None:
        self.address, self.timeout, self._sleep = address, timeout, sleep
        self.client_id = self.generation = self.failed_log = ""
        self.secret: bytes | None = None
        self.state: StateDirectory | None = None
        self._membership: Membership | None = None
        self._not_before = 0.0
        if address.startswith("tcp://"):
            check_address(address)
            self.secret = read_key(key_file)
        else:
            runtime, key = os.path.split(address)
            self.state = StateDirectory(runtime, key)
            self.client_id = uuid.uuid4().hex
            self._membership = Membership(self.state, self.client_id, sleep)

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        if self.state is None:
            self._sleep(max(0.0, self._not_before - time.monotonic()))
            self._not_before = time.monotonic() + RETRY_SECONDS
            return self.address
        deadline = time.monotonic() + self.timeout
        again = time.monotonic() + min(GRACE_SECONDS, self.timeout)
        while not cancelled():
            status = self.state.read_status()
            excluded = status is None or (status.generation == stalled and time.monotonic() < again)
            if status is not None and not excluded and self.state.engine_alive:
                if status.state == "ready" and self._join():
                    self.generation = status.generation
                    return f"ipc://{self.state.file(SOCKET)}"
                if status.state == "loading":
                    deadline = time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                raise Unavailable("the engine is not running", retry_after=1.0)
            self._sleep(POLL_SECONDS)
        raise ShuttingDown("the client was closed")

    def _join(self) -> bool:
        assert self.state is not None
        assert self._membership is not None
        try:
            check_private(self.state.path)
        except FileNotFoundError:  # the engine has just ended
            return False
        lock = self.state.lock(sleep=self._sleep)
        try:
            if not self.state.engine_alive:
                return False
            self._membership.join()
            return True
        finally:
            lock.release()

    def alive(self) -> bool:
        return self.state is None or self.state.engine_alive

    def close(self) -> None:
        if self._membership is not None:
            self._membership.leave()
