"""The search for an engine: when to try again, how long there has been none, and what is logged about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ...interface.errors import PackagingError, ServingError, ShuttingDown
from ...system.backoff import Backoff
from .protocol_state import died

logger = logging.getLogger(__name__)

FIRST_PAUSE, MAX_PAUSE = 0.25, 5.0  # seconds
TRANSIENT_SECONDS = 10.0  # during which a system error (a full disk, no descriptor left) may pass by itself
NOT_FOUND = (ServingError, PackagingError, OSError, zmq.ZMQError)  # the errors of a search for an engine
MAX_REFUSALS = 3  # after this many connections in a row that end before the handshake, the peer refuses us
QUIET_SECONDS = 5.0  # without an engine before this is logged


class Reconnect:
    """The state of a search for an engine. Owned by one thread.

    ``on_failure`` is called with the reason why there is no engine, and with "" when there is one. ``away`` is the
    seconds without an engine; ``endpoint`` is where the last engine was found.
    """

    def __init__(self, on_failure: Callable[[str], object]) -> None:
        self.away = 0.0
        self.endpoint = ""
        self._on_failure = on_failure
        self._backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)
        self._failing_since: float | None = None
        self._refusals = 0
        self._logged = ""

    @property
    def pause(self) -> float:
        """Seconds before the next try."""
        return self._backoff.pause

    def found(self) -> None:
        self._backoff.succeeded()
        self._failing_since = None
        self._on_failure("")

    def failed(self, error: Exception) -> ServingError | None:
        """Return the error with which requests that wait for an engine fail; None if they may continue to wait."""
        logger.warning("no engine: %s", error)
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._backoff.failed()
        if not isinstance(error, ShuttingDown):
            self._on_failure(str(error))
        if isinstance(error, ServingError):
            return error
        transient = not isinstance(error, PackagingError) and now - self._failing_since < TRANSIENT_SECONDS
        return None if transient else died(str(error))

    def broken(self, *, had_begun: bool) -> None:
        """Note that a connection broke; ``had_begun`` says whether the handshake had succeeded before."""
        self._refusals = 0 if had_begun else self._refusals + 1

    def refusal(self, said: str, *, has_handshake: bool) -> str:
        """Return why the peer at ``endpoint`` is not our engine, "" if unknown; ``said`` is the peer's answer."""
        if self._refusals >= MAX_REFUSALS and not has_handshake:
            return f"{self.endpoint} refused the connection: the engine there has another key, or it is not an engine"
        return f"{self.endpoint}: {said}" if said else ""

    def log_absence(self, refusal: str) -> None:
        """Log why there is no engine, once for each reason."""
        reason = refusal or (f"no engine at {self.endpoint}" if self.away > QUIET_SECONDS else self._logged)
        if reason != self._logged:
            self._logged = reason
            logger.warning("%s", reason)

    def is_back(self) -> None:
        """Note that the engine answers, so that its next absence is logged again."""
        self.away, self._logged = 0.0, ""
