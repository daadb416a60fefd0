"""The names of an engine's adapters, polled, so that no request waits for the engine to list them.

Any client of an engine may load and unload adapters, in other processes too, and the engine notifies no other. So a
greenlet asks it again and again, and that one may wait as long as the engine is away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import gevent
from gevent.event import Event

from ..engine.interface import Engine
from ..errors import ServingError

INTERVAL = 1.0  # seconds from an answer to the next question


class AdapterPoller:
    """Polls an engine for its adapters. Call it for the names: ``known`` before the first answer, then those of the
    last one. Never blocks, and any thread may call. ``answered`` is set when the engine has answered once, or refused
    to.

    A name that has just been unloaded may still be among them: the engine itself refuses it then.
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
            gevent.sleep(INTERVAL)
