"""Poll the names of an engine's adapters, so that no request waits for the engine to list them.

Any client of an engine may load and unload adapters, from other processes too, and the engine does not notify the other
clients. So a greenlet polls the engine; only this greenlet waits while the engine is away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import gevent
from gevent.event import Event

from ..interface.engine import Engine
from ..interface.errors import ServingError

POLL_SECONDS = 1.0  # seconds from an answer to the next poll


class AdapterPoller:
    """A poller of an engine for its adapters.

    Calling the poller returns the names: ``known`` before the engine's first answer, later those of its last answer.
    A call never blocks and may come from any thread. ``answered`` is set once the engine has answered or refused to. An
    adapter that has just been unloaded may still be among the names; then the engine itself refuses it.
    """

    def __init__(self, engine: Engine, known: Iterable[str]) -> None:
        self._engine = engine
        self._names = tuple(known)
        self.answered = Event()
        self._asking = gevent.spawn(self._ask)

    def __call__(self) -> tuple[str, ...]:
        return self._names

    def close(self) -> None:
        self._asking.kill(block=False)

    def _ask(self) -> None:
        while True:
            with contextlib.suppress(ServingError):
                self._names = tuple(sorted(adapter.name for adapter in self._engine.adapters()))
            self.answered.set()
            gevent.sleep(POLL_SECONDS)
