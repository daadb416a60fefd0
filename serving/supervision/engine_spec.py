"""Which engine a replica is, and how the process that keeps it running comes to it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ..bundle import Bundle
from ..settings import EngineSettings
from ..transport.discovery.attacher import Attacher
from ..transport.discovery.launcher import Launcher, engine_key
from ..transport.process_spec import ENGINE_CORE
from .backoff_launcher import BackoffLauncher


class EngineSpec(Struct, frozen=True, kw_only=True):
    """Model, settings and place of an engine. Equal ``key``: the same engine.

    ``addresses`` (``tcp://host:port``) are those of engines that other hosts keep, a replica each: none is started
    here. ``listen`` is where a process started here takes clients of other hosts, which may have adapters
    loaded from below ``adapter_dirs``. Either needs ``key_file``.
    """

    bundle: Bundle
    settings: EngineSettings = EngineSettings()
    core: str = ENGINE_CORE
    addresses: tuple[str, ...] = ()
    listen: str | None = None
    key_file: str | None = None
    adapter_dirs: tuple[str, ...] = ()
    drain_timeout: float = 0.0

    def key(self) -> str:
        """Reads the adapters' files; to be asked once."""
        return engine_key(self.bundle, self.settings, " ".join((self.core, *self.addresses)))

    def is_same(self, other: EngineSpec) -> bool:
        """Whether both are one engine, wherever their files lie: a version logged twice is downloaded twice."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        bundle = self.bundle
        served = (bundle.content_hash, bundle.tasks, bundle.embedding, sorted(bundle.adapters))
        return (*served, self.settings, self.core, self.addresses)

    def address(self, index: int, state_dir: str | None) -> str:
        """The address of replica ``index``, as ``attach`` takes it."""
        return self.addresses[index] if self.addresses else self._launcher(index, state_dir).state.path

    def finder(self, index: int, state_dir: str | None, over: Callable[[], bool]) -> Attacher | Launcher:
        """For the process that keeps the replica: of an engine of this host it starts one where there is none."""
        if self.addresses:
            return Attacher(self.addresses[index], key_file=self.key_file)
        return self._launcher(index, state_dir, over)

    def _launcher(self, index: int, state_dir: str | None, over: Callable[[], bool] = lambda: False) -> BackoffLauncher:
        return BackoffLauncher(
            self.bundle,
            self.settings,
            core=self.core,
            replica=index,
            state_dir=state_dir,
            listen=self.listen,
            key_file=self.key_file,
            adapter_dirs=self.adapter_dirs,
            drain_timeout=self.drain_timeout,
            over=over,
        )
