"""The engine host, ``mlflow-llm engine``: one supervised engine on this host for servers on other hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from ..interface.engine import Engine
from ..interface.errors import EngineDied
from ..transport.discovery.state_directory import StateDirectory
from .engine_spec import EngineSpec
from .supervisor import ReplicaStatus, Supervisor

NAME = "engine"
CHECK_SECONDS = 0.1
END_SECONDS = 10.0  # that an engine may take to end after its drain
Say = Callable[..., object]


class EngineHost:
    """An engine host. ``probe(engine)`` raises while the engine cannot work; ``say(stage, **fields)`` reports steps."""

    def __init__(
        self,
        model: EngineSpec,
        *,
        probe: Callable[[Engine], object],
        say: Say = lambda stage, **fields: None,
        state_dir: str | None = None,
    ) -> None:
        self._model, self._say = model, say
        self._over = threading.Event()
        self._at_once = threading.Event()
        self._supervisor = Supervisor(state_dir=state_dir, probe=probe)

    def stop(self) -> None:
        """End the host. Safe in a signal handler.

        The first call lets running requests finish within the model's ``drain_timeout``; the second ends them at once.
        """
        if self._over.is_set():
            self._at_once.set()
        self._over.set()

    def run(self) -> None:
        """Run until ``stop``. Raises ``EngineDied`` if the engine fails before it was ready once; later failures are
        retried."""
        began = time.monotonic()
        self._supervisor.add(NAME, self._model)
        state = self._state()
        try:
            self._say("loading", model=self._model)
            self._keep(began)
        finally:
            self._supervisor.close()
            self._end(state)

    def _keep(self, began: float) -> None:
        before, was_ready = "starting", False
        while not self._over.is_set():
            status = self._status()
            if status is not None and status.state != before:
                before = status.state
                if status.state == "failed" and not was_ready:
                    raise EngineDied(status.message)
                was_ready = was_ready or status.state == "ready"
                self._tell(status, time.monotonic() - began)
                began = time.monotonic()
            self._over.wait(CHECK_SECONDS)

    def _tell(self, status: ReplicaStatus, seconds: float) -> None:
        if status.state == "ready":
            info = self._supervisor.status(NAME).info
            kernels = info.kernels_summary if info is not None else ""
            self._say("ready", seconds=round(seconds, 2), address=self._model.listen, kernels=kernels)
        elif status.state == "failed":
            self._say("failed", message=status.message)
        else:
            self._say("restarting")

    def _status(self) -> ReplicaStatus | None:
        return next(iter(self._supervisor.status(NAME).replicas), None)

    def _state(self) -> StateDirectory:
        status = self._status()
        assert status is not None, "just added"
        return StateDirectory(*os.path.split(status.address))

    def _end(self, state: StateDirectory) -> None:
        if state.engine_alive:
            self._say("draining", seconds=self._model.drain_timeout)
        end_engine(state, self._model.drain_timeout, at_once=self._at_once.is_set)
        self._say("stopped")


def end_engine(state: StateDirectory, drain_timeout: float, *, at_once: Callable[[], bool]) -> None:
    """End an engine, which has its own session and would outlive this process while servers use it.

    Running requests have ``drain_timeout`` seconds, until ``at_once()`` is true.
    """
    sent: list[signal.Signals] = []
    until = time.monotonic() + drain_timeout + END_SECONDS
    while state.engine_alive and time.monotonic() < until + END_SECONDS:
        wanted = signal.SIGQUIT if at_once() else signal.SIGTERM
        if time.monotonic() > until:
            wanted = signal.SIGKILL
        elif wanted == signal.SIGQUIT and wanted not in sent:
            until = time.monotonic() + END_SECONDS
        if wanted not in sent and _send(state, wanted):
            sent.append(wanted)
        time.sleep(CHECK_SECONDS / 2)
    state.remove_if_abandoned()


def _send(state: StateDirectory, wanted: signal.Signals) -> bool:
    """Send a signal to the engine; return False if it has just begun to start and has not written its pid yet.

    The engine holds its lock, so the pid is still its own.
    """
    status = state.read_status()
    if status is None or status.pid <= 0:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(status.pid, wanted)
    return True
