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
    here. Those of a ``hosted`` engine, on hosts that have joined, change while it is kept. ``listen`` is where an
    engine process started here accepts clients on other hosts, which may load adapters from below ``adapter_dirs``,
    and such whose content the host fetches (``adapter_requests``, ``transport.adapter_places``).
    All need ``key_file``. The engine journals for such clients below the state directory ``journals``.
    """

    bundle: Bundle
    settings: EngineSettings = EngineSettings()
    core: str = ENGINE_CORE
    addresses: tuple[str, ...] = ()
    hosted: bool = False
    listen: str | None = None
    key_file: str | None = None
    adapter_dirs: tuple[str, ...] = ()
    adapter_requests: str = ""
    journals: str = ""
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
        return (*served, self.settings, self.core, self.hosted or self.addresses)

    @property
    def is_here(self) -> bool:
        """Whether its engine processes are on this host."""
        return not self.hosted and not self.addresses

    def address(self, index: int, state_dir: str | None) -> str:
        """Return the address of replica ``index``, as ``attach`` takes it."""
        return self._launcher(index, state_dir).state.path if self.is_here else self.addresses[index]

    def finder(self, index: int, state_dir: str | None, over: Callable[[], bool]) -> Attacher | Launcher:
        """Return the finder for the process that keeps the replica; for this host, one that also starts an engine."""
        if self.is_here:
            return self._launcher(index, state_dir, over)
        return Attacher(self.addresses[index], key_file=self.key_file)

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
            adapter_requests=self.adapter_requests,
            journals=self.journals,
            drain_timeout=self.drain_timeout,
            over=over,
        )
