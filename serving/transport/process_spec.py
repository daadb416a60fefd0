"""The parameters of an engine process, in a JSON file that it reads at its start."""

from __future__ import annotations

from msgspec import Struct

from ..bundle import Bundle
from ..settings import EngineSettings

MODULE = "serving.transport.engine_process.main"
ENGINE_CORE = "mlflow_llm.serving.engine.core:EngineCore"


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """What an engine process runs, for whom and where.

    ``core`` is ``module:name`` of a ``CoreFactory`` (``engine.interface``); ``lock_fd`` the inherited, held engine
    lock. ``listen`` is a TCP endpoint for clients on other hosts, ``key_file`` holds the key they share with us.
    ``adapter_dirs``: where such clients may have adapters loaded from. ``drain_timeout``: seconds that requests have
    after SIGTERM; SIGQUIT ends them at once. ``control_fd``: a warm standby's control socket to
    its engine, whose lock it holds too."""

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
    drain_timeout: float = 0.0
    control_fd: int = -1
