"""How the search for an engine goes: when to look again, and what those who wait for it are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ...backoff import Backoff
from ...errors import PackagingError, ServingError, ShuttingDown
from .protocol_state import died

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds
PASSING = 10.0  # seconds in which what the system refused (a full disk, no descriptor left) may pass by itself
NOT_FOUND = (ServingError, PackagingError, OSError, zmq.ZMQError)  # what a search for an engine raises


class Search:
    """``told`` hears why there is no engine, and "" once there is one. Owned by one thread."""

    def __init__(self, told: Callable[[str], object]) -> None:
        self._told = told
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._failing_since: float | None = None

    @property
    def pause(self) -> float:
        """Seconds before the next try."""
        return self._backoff.pause

    def found(self) -> None:
        self._backoff.succeeded()
        self._failing_since = None
        self._told("")

    def failed(self, error: Exception) -> ServingError | None:
        """What those who wait are to be told; None where they may well go on."""
        logger.warning("no engine: %s", error)
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._backoff.failed()
        if not isinstance(error, ShuttingDown):
            self._told(str(error))
        if isinstance(error, ServingError):
            return error
        passing = not isinstance(error, PackagingError) and now - self._failing_since < PASSING
        return None if passing else died(str(error))
