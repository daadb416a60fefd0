"""The parameters of an engine process, in a JSON file that it reads when it starts."""

from __future__ import annotations

from msgspec import Struct

from ..interface.bundle import Bundle
from ..interface.settings import EngineSettings

MODULE = "serving.transport.engine_process.main"
ENGINE_CORE = "mlflow_llm.serving.engine.core:EngineCore"
CORES = {"native": ENGINE_CORE, "vllm": "mlflow_llm.serving.engine.vllm.core:VllmCore"}
"""The core of each ``EngineSettings.engine``."""


def core_of(settings: EngineSettings, core: str = ENGINE_CORE) -> str:
    """Return the name of the core that runs a model: ``core``, unless the settings name another engine."""
    return CORES[settings.engine] if core == ENGINE_CORE else core


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """The specification of an engine process: what it runs, for which clients, and where.

    ``core`` is the ``module:name`` of a ``CoreFactory`` (``engine.interface``). ``lock_fd`` is the inherited file
    descriptor of the engine lock, which is held. ``listen`` is a TCP endpoint for clients on other hosts; ``key_file``
    holds the key shared with them, ``adapter_dirs`` are the directories they may load adapters from, and the engine
    asks its host for contents of adapters in the directory ``adapter_requests`` (``adapter_places``), "" for none. It
    keeps their journals below the state directory ``journals`` (``system.journal.journals_of``), "" for none.
    On SIGTERM, an engine with ``listen`` gives running requests ``drain_timeout`` seconds; any other ends once its last
    client has gone, or at a second SIGTERM. SIGQUIT ends running requests at once. ``control_fd`` is a warm standby's
    control socket to its engine (the standby also holds the engine's lock)."""

    bundle: Bundle
    settings: EngineSettings
    runtime: str
    key: str
    generation: str
    lock_fd: int
    core: str = ENGINE_CORE
    listen: str | None = None
    key_file: str | None = None
    adapter_dirs: tuple[str, ...] = ()
    adapter_requests: str = ""
    journals: str = ""
    drain_timeout: float = 0.0
    control_fd: int = -1
