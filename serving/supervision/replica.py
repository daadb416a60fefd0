"""One replica: an engine process that is started, probed, watched, restarted and drained. See ``supervisor``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

import psutil

from ..interface.engine import Engine
from ..interface.errors import EngineDied, ShuttingDown
from ..system.backoff import Backoff
from ..transport.client.client import RemoteEngine
from ..transport.client.finder import Finder
from ..transport.client.reconnect import NOT_FOUND
from .adapter_sync import AdapterSync
from .backoff_launcher import FIRST_PAUSE, HEALTHY_SECONDS, MAX_PAUSE
from .engine_spec import EngineSpec

logger = logging.getLogger(__name__)

ReplicaState = Literal["starting", "ready", "failed", "draining"]
CHECK_SECONDS = 0.1  # seconds between checks
ADAPTER_SECONDS = 30.0  # seconds that a start waits for adapters that cannot be loaded for the moment
AWAY_SECONDS = 60.0  # seconds that a probe waits for an engine on another host


class Replica:
    """A replica; it runs on its own thread from its construction on. Its last action is to call ``ended(self)``."""

    def __init__(
        self,
        model: EngineSpec,
        *,
        index: int,
        state_dir: str | None,
        probe: Callable[[Engine], object],
        changed: Callable[[], object],
        in_use: Callable[[str], bool],
        ended: Callable[[Replica], object],
        adapters: AdapterSync,
        store: str = "",
    ) -> None:
        self.state: ReplicaState = "starting"
        self.message = ""
        self.was_ready = False
        self._finder: Finder | None = None
        self.engine: RemoteEngine | None = None
        self.start_seconds: float | None = None  # of the last start, until the engine passed the probe
        self._model = model
        self._probe, self._changed, self._in_use, self._ended = probe, changed, in_use, ended
        self.adapters = adapters
        self._store = store
        self._draining = self._stopping = self._is_over = False
        self._lock = threading.Lock()
        self._num_probes = 0
        self._trouble = ""  # why an engine that was there before is not found
        self._ready_since: float | None = None

        def make() -> Finder:
            self._finder = model.finder(index, state_dir, self._over)
            return self._finder

        self._make = make
        self.address = model.address(index, state_dir)
        self._thread = threading.Thread(target=self._run, name=f"mlflow-llm-replica-{index}", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether its engine is a process on this host."""
        return self._model.is_here

    @property
    def is_hosted(self) -> bool:
        """Whether its engine was placed on a joined host."""
        return self._model.hosted

    @property
    def is_draining(self) -> bool:
        """Whether it ends once its engine is no longer used."""
        return self._draining

    @property
    def restarts(self) -> int:
        return max(0, self._num_probes - 1)

    @property
    def failed_log(self) -> str:
        """The log of the last engine whose start failed."""
        return "" if self._finder is None else self._finder.failed_log

    def drain(self) -> None:
        """End the replica once its engine is no longer used."""
        self._draining = True

    def revive(self) -> bool:
        """Undo ``drain``; return False if it is too late for that."""
        with self._lock:
            self._draining = False
            return not self._is_over

    def stop(self) -> None:
        self._stopping = True

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _over(self) -> bool:
        with self._lock:
            over = self._stopping or (self._draining and not self._is_used())
            self._is_over = self._is_over or over
            return self._is_over

    def _is_used(self) -> bool:
        try:
            return self._in_use(self.address)
        except OSError:  # unknown, so assume that it is used
            return True

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)
        try:
            while not self._over():
                self._ready_since = None
                try:
                    self._keep()
                except NOT_FOUND as error:
                    if self._is_over and isinstance(error, ShuttingDown):
                        return
                    logger.warning("engine at %s: %s", self.address, error)
                    self.message = str(error)
                    self._set("failed")
                    if self._was_healthy():
                        backoff.succeeded()
                    self.sleep(backoff.failed())
        finally:
            self._is_over = True
            self._ended(self)

    def _was_healthy(self) -> bool:
        return self._ready_since is not None and time.monotonic() - self._ready_since >= HEALTHY_SECONDS

    def _keep(self) -> None:
        """Keep the engine running until the replica is over.

        Raises the error that prevents it, except errors after which the client itself tries again.
        """
        self._trouble = ""
        began = time.monotonic()
        engine = RemoteEngine(
            self._make,
            stall_timeout=self._model.settings.stall_timeout,
            keep=True,
            timeout=self._model.settings.start_timeout,
            away_timeout=AWAY_SECONDS,
            cancelled=self._over,
            content_hash=self._model.bundle.content_hash,
            store=self._store,
            on_search_failure=self._note_failure,
        )
        self.engine = engine
        probed, probed_at = "", 0.0
        try:
            while not self._over():
                generation, status = engine.generation, engine.health().status
                if status == "dead":
                    raise EngineDied("the engine's client has ended")
                if not generation or status != "ready":
                    self._wait()
                elif generation != probed:
                    self._set("starting")
                    self._num_probes += 1
                    self._probe(engine)
                    self.adapters.begin()
                    self.adapters.sync(engine)
                    probed_at = time.monotonic()
                    if self.is_here and not probed and started_since(engine.info.pid, began):
                        self.start_seconds = time.monotonic() - began
                    probed, self.message = generation, ""
                else:
                    if self.adapters.sync(engine):
                        self._changed()
                    lacks = not self.adapters.is_complete and time.monotonic() - probed_at < ADAPTER_SECONDS
                    if lacks and self.state == "starting":
                        time.sleep(CHECK_SECONDS)
                        continue
                    self._set("draining" if self._draining else "ready")
                    self._ready_since = self._ready_since or time.monotonic()
                    time.sleep(CHECK_SECONDS)
                    continue
                time.sleep(CHECK_SECONDS / 10)
        finally:
            self.engine = None
            engine.close()

    def _note_failure(self, message: str) -> None:
        self._trouble = message

    def _wait(self) -> None:
        """Show why there is no engine while the client looks for it or restarts it."""
        self.message = self._trouble or self.message
        self._set("failed" if self._trouble else "starting")

    def _set(self, state: ReplicaState) -> None:
        if state != self.state:
            self.state = state
            self.was_ready = self.was_ready or state == "ready"
            self._changed()

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._over():
            time.sleep(CHECK_SECONDS)


def started_since(pid: int, began: float) -> bool:
    """Return whether a process was started after ``began`` (``time.monotonic``), rather than found running."""
    try:
        return bool(psutil.Process(pid).create_time() >= time.time() - (time.monotonic() - began) - 1.0)
    except psutil.Error:
        return False
