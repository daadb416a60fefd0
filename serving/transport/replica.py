"""One engine process kept running: started, proven, watched, started again, drained. See ``supervisor``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from ..bundle import Bundle
from ..engine.interface import Engine
from ..errors import PackagingError, ServingError, ShuttingDown
from ..settings import EngineSettings
from .client import RemoteEngine
from .launch import Launcher

logger = logging.getLogger(__name__)

ReplicaState = Literal["starting", "ready", "failed", "draining"]
TURN = 0.1  # seconds between looks
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
HEALTHY_LIFE = 2.0  # seconds; an engine that lived so long is started again at once


class Backoff:
    """Pauses between starts: none before the first and after a healthy life, else doubling."""

    def __init__(self) -> None:
        self._pause = 0.0

    def died_after(self, seconds: float) -> float:
        """The seconds to wait before the next start."""
        if seconds >= HEALTHY_LIFE:
            self._pause = 0.0
            return 0.0
        pause, self._pause = self._pause, min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        return pause


class PatientLauncher(Launcher):
    """A launcher that does not start a crashing engine as fast as it can crash."""

    def __init__(self, *args: Any, over: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._over = over
        self._backoff = Backoff()
        self._found_at: float | None = None
        self.starts = 0

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        def ended() -> bool:
            return self._over() or cancelled()

        if self._found_at is not None:
            until = time.monotonic() + self._backoff.died_after(time.monotonic() - self._found_at)
            while time.monotonic() < until and not ended():
                time.sleep(TURN / 2)
        self._found_at = time.monotonic()
        found = super().find(stalled, ended)
        self._found_at = time.monotonic()
        self.starts += 1
        return found


class Replica:
    """Runs on a thread of its own from the moment it is made. ``ended(self)`` is the last thing it calls."""

    def __init__(
        self,
        bundle: Bundle,
        settings: EngineSettings,
        *,
        core: str,
        index: int,
        state_dir: str | None,
        prove: Callable[[Engine], object],
        changed: Callable[[], object],
        in_use: Callable[[str], bool],
        ended: Callable[[Replica], object],
    ) -> None:
        self.state: ReplicaState = "starting"
        self.message = ""
        self.proven = False
        self.engine: RemoteEngine | None = None
        self._settings = settings
        self._prove, self._changed, self._in_use, self._ended = prove, changed, in_use, ended
        self._draining = self._stopping = self._is_over = False
        self._lock = threading.Lock()
        self._launcher: PatientLauncher | None = None

        def make() -> PatientLauncher:
            return PatientLauncher(bundle, settings, core=core, replica=index, state_dir=state_dir, over=self._over)

        self._make = make
        self.address = make().state.path
        self._thread = threading.Thread(target=self._run, name=f"mlflow-llm-replica-{index}", daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        return max(0, self._launcher.starts - 1) if self._launcher is not None else 0

    def drain(self) -> None:
        """Go on until nobody uses the engine."""
        self._draining = True

    def revive(self) -> bool:
        """Take ``drain`` back; False where it is too late for that."""
        with self._lock:
            self._draining = False
            return not self._is_over

    def stop(self) -> None:
        self._stopping = True

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _over(self) -> bool:
        with self._lock:
            over = self._stopping or (self._draining and not self._in_use(self.address))
            self._is_over = self._is_over or over
            return self._is_over

    def _run(self) -> None:
        pause = FIRST_PAUSE
        try:
            while not self._over():
                try:
                    self._keep()
                except (ServingError, PackagingError, OSError) as error:
                    if self._is_over and isinstance(error, ShuttingDown):
                        return
                    logger.warning("engine at %s: %s", self.address, error)
                    self.message = str(error)
                    self._set("failed")
                    self._sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._is_over = True
            self._ended(self)

    def _keep(self) -> None:
        """Returns when it is over; raises what keeps the engine from running."""
        self._launcher = launcher = self._make()
        engine = RemoteEngine(lambda: launcher, stall_timeout=self._settings.stall_timeout, keep=True)
        self.engine = engine
        proven = 0
        try:
            while not self._over():
                if engine.health().status != "ready":
                    self._set("starting")
                elif engine.info.pid != proven:
                    self._set("starting")
                    pid = engine.info.pid
                    self._prove(engine)
                    proven, self.message = pid, ""
                else:
                    self._set("draining" if self._draining else "ready")
                    time.sleep(TURN)
                    continue
                time.sleep(TURN / 10)
        finally:
            self.engine = None
            engine.close()

    def _set(self, state: ReplicaState) -> None:
        if state != self.state:
            self.state = state
            self.proven = state == "ready" or (self.proven and state != "failed")
            self._changed()

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._over():
            time.sleep(TURN)
