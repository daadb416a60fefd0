"""How many messages come at once: gRPC hands a message over whole, so that none of its bytes can be counted before.

Without a bound each of its threads could hold the largest one before the memory budget hears of it. So a call has a
*turn* while its message comes and until the budget has counted it; what no turn is free for waits with the client.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ..control.settings import ServerSettings
from ..errors import Aborted, Overloaded, RequestError
from ..http.memory_budget import RETRY_AFTER, SMALL, Allocation
from .call import Call
from .codec import parsed
from .messages import ModelInferRequest

TICK = 1.0  # seconds between looks at those that are late


class Message:
    """One message, held until it is received; ``counted`` is called when it is in the memory budget, or is over,
    perhaps more than once."""

    def __init__(self, data: bytes, counted: Callable[[], None] | None = None) -> None:
        self.data = data
        self.size = len(data)
        self._counted = counted
        self._id: str | None = None

    @property
    def id(self) -> str:
        """The request's, "" where it has none."""
        if self._id is None:
            try:
                self._id = str(parsed(self.data, ModelInferRequest).id)
            except RequestError:
                self._id = ""
        return self._id

    def counted(self) -> None:
        if self._counted is not None:
            self._counted()

    def address(self) -> tuple[str, str]:
        """Model and version that it names. Raises ``RequestError``."""
        asked = parsed(self.data, ModelInferRequest)
        self._id = str(asked.id)
        return asked.model_name, asked.model_version

    def receive(self, allocation: Allocation) -> bytes:
        """Its bytes, in the memory budget now, and nowhere else any more."""
        data, self.data = self.data, b""
        try:
            allocation.grow(self.size)
        finally:
            self.counted()
        return data


class Turn:
    """Of ``call``, since a time; ``has_come``: its message."""

    def __init__(self, call: Call, caller: str, end: Callable[[Turn], None]) -> None:
        self.call, self.caller, self.since = call, caller, time.monotonic()
        self.has_come = False
        self._end = end

    def end(self) -> None:
        """More than once is as good as once."""
        self._end(self)


class Intake:
    """At most ``total`` turns, ``by_caller`` of one caller. Who has waited ``patience`` seconds is refused; a turn that
    lasts longer while others wait loses its call. Used by many threads."""

    def __init__(self, *, total: int, by_caller: int, patience: float) -> None:
        self._total, self._by_caller, self._patience = total, by_caller, patience
        self._changed = threading.Condition()
        self._turns: set[Turn] = set()

    @staticmethod
    def of(settings: ServerSettings) -> Intake:
        """As many of the largest messages as the memory budget has room for."""
        largest = settings.max_body_bytes
        return Intake(
            total=max(2, settings.max_held_bytes // largest),
            by_caller=max(1, settings.max_caller_bytes // largest),
            patience=settings.io_timeout,
        )

    @contextlib.contextmanager
    def turn(self, call: Call, caller: str) -> Iterator[Turn]:
        """A turn, which ends at the end of it, or before. Raises ``Overloaded``, and ``Aborted`` where the call has
        ended."""
        turn = self._begin(call, caller)
        try:
            yield turn
        finally:
            turn.end()

    def _begin(self, call: Call, caller: str) -> Turn:
        with self._changed:
            until = time.monotonic() + self._patience
            while not self._has_room(caller):
                now = time.monotonic()
                if call.is_over:
                    raise Aborted("the client went away")
                if now >= until:
                    raise Overloaded("body: too many large requests are being read; try again", retry_after=RETRY_AFTER)
                for turn in self._turns:
                    if not turn.has_come and now - turn.since > self._patience:
                        turn.call.context.cancel()
                self._changed.wait(min(TICK, until - now))
            mine = Turn(call, caller, self._finish)
            self._turns.add(mine)
            return mine

    def _has_room(self, caller: str) -> bool:
        own = sum(turn.caller == caller for turn in self._turns)
        return len(self._turns) < self._total and own < self._by_caller

    def _finish(self, turn: Turn) -> None:
        with self._changed:
            if turn in self._turns:
                self._turns.remove(turn)
                self._changed.notify_all()


def is_small(data: bytes) -> bool:
    """Whether a message is one that the memory budget does not count."""
    return len(data) <= SMALL
