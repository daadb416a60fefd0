"""The engine that a replica runs, and how the process that keeps it running finds it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ..interface.bundle import Bundle
from ..interface.settings import EngineSettings
from ..transport.discovery.attacher import Attacher
from ..transport.discovery.launcher import Launcher, engine_key
from ..transport.process_spec import ENGINE_CORE
from .backoff_launcher import BackoffLauncher


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model, settings and location of an engine. Specs with equal ``key`` are the same engine.

    ``addresses`` (``tcp://host:port``) are those of engines that run on other hosts, one replica each; none is started
    here. ``listen`` is where an engine process started here accepts clients on other hosts, which may load adapters
    from below ``adapter_dirs``. Both need ``key_file``.
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
        """Return the engine's key. This reads the adapters' files, so call it only once."""
        return engine_key(self.bundle, self.settings, " ".join((self.core, *self.addresses)))

    def is_same(self, other: EngineSpec) -> bool:
        """Return whether both are the same engine, even if their files are in different places: a version that is
        logged twice is downloaded twice."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        bundle = self.bundle
        served = (bundle.content_hash, bundle.tasks, bundle.embedding, sorted(bundle.adapters))
        return (*served, self.settings, self.core, self.addresses)

    def address(self, index: int, state_dir: str | None) -> str:
        """Return the address of replica ``index``, as ``attach`` takes it."""
        return self.addresses[index] if self.addresses else self._launcher(index, state_dir).state.path

    def finder(self, index: int, state_dir: str | None, over: Callable[[], bool]) -> Attacher | Launcher:
        """Return the finder for the process that keeps the replica; for this host, one that also starts an engine."""
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
