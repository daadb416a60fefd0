"""Load the adapters that an engine should have in addition to its model's own, on the thread that keeps its replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from ..interface.engine import Engine, public_name
from ..interface.errors import LimitExceeded, NotFound, ServingError, Unavailable

RETRY_SECONDS = 1.0  # seconds before another attempt at what an engine could not do for the moment
logger = logging.getLogger(__name__)


class WantedAdapter(Struct, frozen=True, kw_only=True):
    """A directory in peft's layout. Another ``revision`` is another adapter, even with the same path. A ``pinned``
    adapter is never evicted. ``is_old``: another content has its place, and requests on their way may still name it."""

    path: str
    revision: str
    pinned: bool = False
    is_old: bool = False


class WantedAdapters(Struct, frozen=True, kw_only=True):
    """The adapters, by name, that an engine should have; ``withdrawn`` are names that it may still have from before."""

    adapters: Mapping[str, WantedAdapter] = {}
    withdrawn: frozenset[str] = frozenset()


NO_ADAPTERS = WantedAdapters()


class AdapterSync:
    """The synchronisation of the adapters of one replica.

    ``loaded`` has the revision of each name that its engine has, ``refused`` the revision that the engine refused and
    why. Both are replaced as a whole, for readers on other threads. ``is_complete`` says whether nothing is to be tried
    again."""

    def __init__(self, wanted: Callable[[], WantedAdapters]) -> None:
        self._wanted = wanted
        self._done: WantedAdapters | None = None
        self.is_complete = False
        self._retry_at = 0.0
        self.loaded: Mapping[str, str] = {}
        self.refused: Mapping[str, tuple[str, str]] = {}

    def begin(self) -> None:
        """Start over with another engine process, whose adapters are not known."""
        self._done, self.loaded, self._retry_at, self.is_complete = None, {}, 0.0, False

    def sync(self, engine: Engine) -> bool:
        """Load and unload adapters as wanted; return whether anything has changed.

        Temporary failures, usually a full adapter memory, are retried at a call after ``RETRY_SECONDS``.
        """
        wanted = self._wanted()
        if wanted == NO_ADAPTERS:
            self.is_complete = True
        if wanted is self._done or (self._done is None and wanted == NO_ADAPTERS) or time.monotonic() < self._retry_at:
            return False
        before = (self.loaded, self.refused)
        complete = True
        try:
            for name, adapter in wanted.adapters.items():
                complete = self._load(engine, name, adapter) and complete
            self._unload(engine, wanted)
        except Unavailable as error:
            logger.warning("adapters are loaded later: %s", error)
            complete = False
        self._done, self.is_complete = wanted if complete else None, complete
        self._retry_at = 0.0 if complete else time.monotonic() + RETRY_SECONDS
        return (self.loaded, self.refused) != before

    def _load(self, engine: Engine, name: str, adapter: WantedAdapter) -> bool:
        if self.loaded.get(name) == adapter.revision or self.refused.get(name, ("", ""))[0] == adapter.revision:
            return True
        try:
            self._replace(engine, name, adapter)
        except Unavailable:
            return False
        except ServingError as error:
            if adapter.is_old:
                return True  # it has left for the one in its place
            logger.warning("adapter %s: %s", name, error)
            self.refused = {**self.refused, name: (adapter.revision, error.message)}
        else:
            self.loaded = {**self.loaded, name: adapter.revision}
        return True

    def _replace(self, engine: Engine, name: str, adapter: WantedAdapter) -> None:
        """Load an adapter. Where there is no room for it beside its other contents, these go first."""
        try:
            engine.load_adapter(name, adapter.path, replace=True, pinned=adapter.pinned)
        except LimitExceeded:
            others = [one for one in self.loaded if one != name and public_name(one) == public_name(name)]
            if not others or adapter.is_old:
                raise
            for one in others:
                engine.unload_adapter(one, at_once=True)
            self.loaded = {one: revision for one, revision in self.loaded.items() if one not in others}
            engine.load_adapter(name, adapter.path, replace=True, pinned=adapter.pinned)

    def _unload(self, engine: Engine, wanted: WantedAdapters) -> None:
        gone = wanted.withdrawn & ({info.name for info in engine.adapters()} if wanted.withdrawn else frozenset())
        for name in gone:
            try:
                engine.unload_adapter(name, at_once=True)
            except NotFound:
                continue
        if gone or self.loaded.keys() - wanted.adapters.keys():
            self.loaded = {name: revision for name, revision in self.loaded.items() if name in wanted.adapters}
