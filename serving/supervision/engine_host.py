"""The engine host, ``mlflow-llm engine``: one supervised engine on this host for servers on others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from ..engine.interface import Engine
from ..errors import EngineDied
from ..transport.discovery.state_directory import StateDirectory
from .engine_spec import EngineSpec
from .supervisor import ReplicaStatus, Supervisor

NAME = "engine"
TURN = 0.1
END_SECONDS = 10.0  # an engine may take to end after its drain
Say = Callable[..., object]


class EngineHost:
    """``probe(engine)`` raises while the engine cannot work; ``say(stage, **fields)`` reports what happens."""

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
        """End: the first time when what runs has ended, within the model's ``drain_timeout``, then at once. Safe in a
        signal handler."""
        if self._over.is_set():
            self._at_once.set()
        self._over.set()

    def run(self) -> None:
        """Until ``stop``. Raises ``EngineDied`` where the engine does not come up the first time; later it is tried
        again and again."""
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
            self._over.wait(TURN)

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
        """Have the engine end. It is in a session of its own, and would outlive us while servers use it."""
        if state.engine_alive:
            self._say("draining", seconds=self._model.drain_timeout)
        sent: list[signal.Signals] = []
        until = time.monotonic() + self._model.drain_timeout + END_SECONDS
        while state.engine_alive and time.monotonic() < until + END_SECONDS:
            wanted = signal.SIGQUIT if self._at_once.is_set() else signal.SIGTERM
            if time.monotonic() > until:
                wanted = signal.SIGKILL
            elif wanted == signal.SIGQUIT and wanted not in sent:
                until = time.monotonic() + END_SECONDS
            if wanted not in sent and _send(state, wanted):
                sent.append(wanted)
            time.sleep(TURN / 2)
        state.remove_if_abandoned()
        self._say("ended")


def _send(state: StateDirectory, wanted: signal.Signals) -> bool:
    """It holds its lock, so the pid is still its own; one that begins to start has not written its down."""
    status = state.read_status()
    if status is None or status.pid <= 0:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(status.pid, wanted)
    return True
