"""Warm standby: a second engine process, loaded and waiting, that takes over when the serving engine dies.

::

    engine ── socket pair ── standby          both hold engine.lock: clients see one engine all the time
      │ starts and restarts the standby         loads the model, reports it, waits
      │
      ├── ends on purpose: says so ──►        ends
      └── dies: the socket closes ───►        writes status.json, binds the socket anew, serves, keeps a standby

Until it takes over, the standby does not listen for clients. So it is not a replica: it has no requests and sends no
heartbeats. It takes over the engine's directory, settings, KV cache size and the adapters loaded at run time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ...system import child
from ...system.backoff import Backoff
from ...system.file_locks import FileLock
from ..discovery.state_directory import StateDirectory, Status

logger = logging.getLogger("mlflow_llm.engine")

SPEC = "standby-spec.json"
LOADED, DISMISSED = b"L", b"D"
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds between starts of a standby that ends by itself
State = Literal["none", "loading", "ready"]


class WarmStandby:
    """The engine's side: it starts a standby and restarts it. Owned by the engine's thread; no method waits.

    ``describe(generation, lock_fd, control_fd)`` returns the spec of a standby that has these descriptors.
    """

    def __init__(
        self,
        module: str,
        state: StateDirectory,
        lock: FileLock,
        describe: Callable[[str, int, int], Any],
        *,
        start_timeout: float,
    ) -> None:
        self.state: State = "none"
        self._module, self._place, self._lock, self._describe = module, state, lock, describe
        self._start_timeout = start_timeout
        self._control: socket.socket | None = None
        self._starters: list[subprocess.Popen[bytes]] = []  # each forks a standby and ends
        self._pid = 0
        self._backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, at_once=True)
        self._since = time.monotonic()

    @property
    def num_ready(self) -> int:
        return int(self.state == "ready")

    def tick(self) -> None:
        """Check the standby, and start one if there is none."""
        self._starters = [starter for starter in self._starters if starter.poll() is None]
        now = time.monotonic()
        if self._control is not None:
            self._listen(now)
        elif now - self._since >= self._backoff.pause:
            self._since = now
            try:
                self._start()
            except OSError as error:
                logger.warning("a standby cannot be started: %s", error)
                self._fail()

    def dismiss(self) -> None:
        """End the standby, since this engine shuts down."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(DISMISSED)
            self._control.close()
            self._control, self.state = None, "none"

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        lock_fd = os.dup(self._lock.fd)
        try:
            spec = self._describe(uuid.uuid4().hex, lock_fd, theirs.fileno())
            self._place.write_json(SPEC, spec)
            starter = subprocess.Popen(
                child.python_command(
                    self._module, self._place.file(SPEC), flags=("-W", "ignore::RuntimeWarning:runpy")
                ),
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=child.environment(),
                pass_fds=[lock_fd, theirs.fileno()],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(lock_fd)
            theirs.close()
        ours.setblocking(False)
        self._starters.append(starter)
        self._control, self._pid, self.state = ours, 0, "loading"

    def _listen(self, now: float) -> None:
        assert self._control is not None
        try:
            received = self._control.recv(64)
        except BlockingIOError:
            if self.state == "loading" and now - self._since > self._start_timeout:
                logger.warning("the standby was not loaded within start_timeout, %g seconds", self._start_timeout)
                self._fail()
            return
        except OSError:
            received = b""
        if not received:
            logger.warning("the standby ended; another is started")
            self._fail()
            return
        *lines, _ = received.split(b"\n")
        for line in lines:
            if line == LOADED:
                self.state = "ready"
                self._backoff.succeeded(at_once=True)
                logger.info("a standby is ready, pid %d", self._pid)
            else:
                self._pid = int(line)

    def _fail(self) -> None:
        if self.state == "loading":  # a standby that was ready and ended is replaced at once
            self._backoff.failed()
            if self._pid:
                with contextlib.suppress(OSError):
                    os.kill(self._pid, signal.SIGKILL)
        if self._control is not None:
            self._control.close()
        self._control, self.state, self._since = None, "none", time.monotonic()


class Successor:
    """The standby's side. A separate thread waits for the engine's end, even while the model loads."""

    def __init__(self, fd: int, state: StateDirectory, lock: FileLock, generation: str) -> None:
        os.set_inheritable(fd, False)
        self._control = socket.socket(fileno=fd)
        self._state, self._lock, self._generation = state, lock, generation
        self._over = threading.Event()
        self._control.send(b"%d\n" % os.getpid())
        threading.Thread(target=self._await_end, name="mlflow-llm-standby", daemon=True).start()

    @property
    def took_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Report that the model is loaded, and return when the engine is dead."""
        with contextlib.suppress(OSError):  # the engine has just died
            self._control.send(LOADED + b"\n")
        self._over.wait()
        self._control.close()

    def _await_end(self) -> None:
        received = b""
        with contextlib.suppress(OSError):
            received = self._control.recv(1)
        if received == DISMISSED or not self._lock.is_current:
            os._exit(0)  # the engine removes its directory, or the directory is already gone
        logger.warning("the engine died: the standby takes over, pid %d", os.getpid())
        try:
            self._state.write_json("status.json", Status(state="loading", generation=self._generation, pid=os.getpid()))
        except OSError:
            logger.exception("the state directory cannot be written")
            os._exit(1)
        self._over.set()


def standby_settings(settings: Any, kv_cache_memory: int) -> Any:
    """Return the engine's settings with its actual KV cache size in bytes.

    The default size is a share of the free memory, which would be smaller next to a running engine.
    """
    return msgspec.structs.replace(settings, kv_cache_memory=kv_cache_memory) if kv_cache_memory else settings
