"""Engines kept alive for others: the server's master holds one client of each, which starts, watches and restarts it.

Workers find an engine by its address (``attach``). A supervised engine lives as long as the supervisor or a worker.
"""

from __future__ import annotations

import os
import threading

from ..bundle import Bundle
from ..engine.interface import Health
from ..errors import AlreadyExists, NotFound
from ..settings import EngineSettings
from .client import RemoteEngine
from .launch import Launcher, Progress
from .process import ENGINE_CORE


class Supervisor:
    """Named engines of one server. Thread-safe; a forked worker uses ``attach`` and never this object."""

    def __init__(self, *, state_dir: str | None = None, core: str = ENGINE_CORE) -> None:
        self._state_dir, self._core = state_dir, core
        self._engines: dict[str, tuple[RemoteEngine, str]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def start(
        self,
        name: str,
        bundle: Bundle,
        settings: EngineSettings,
        *,
        progress: Progress | None = None,
        listen: str | None = None,
        key_file: str | None = None,
    ) -> str:
        """Start engine ``name``, wait until it is ready, and give its address. Raises what ``connect`` raises."""
        with self._lock:
            if name in self._engines:
                raise AlreadyExists(f"engine {name!r} is running")

        def make() -> Launcher:
            return Launcher(
                bundle,
                settings,
                state_dir=self._state_dir,
                progress=progress,
                core=self._core,
                listen=listen,
                key_file=key_file,
            )

        address = make().state.path
        engine = RemoteEngine(make, stall_timeout=settings.stall_timeout, keep=True)
        with self._lock:
            if name not in self._engines:
                self._engines[name] = (engine, address)
                return address
        engine.close()
        raise AlreadyExists(f"engine {name!r} is running")

    def stop(self, name: str) -> None:
        """Give engine ``name`` up; it ends ``idle_timeout`` after its last worker has left. Raises ``NotFound``."""
        with self._lock:
            if name not in self._engines:
                raise NotFound(f"no engine {name!r}")
            engine, _ = self._engines.pop(name)
        engine.close()

    def addresses(self) -> dict[str, str]:
        with self._lock:
            return {name: address for name, (_, address) in self._engines.items()}

    def health(self) -> dict[str, Health]:
        with self._lock:
            return {name: engine.health() for name, (engine, _) in self._engines.items()}

    def close(self) -> None:
        """Give all engines up; in a forked worker this does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            engines, self._engines = self._engines, {}
        for engine, _ in engines.values():
            engine.close()
