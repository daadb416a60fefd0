"""A limit on how many messages are received at once.

gRPC only hands over complete messages, so their bytes cannot be counted while they arrive. Without a limit, each of its
threads could hold a message of the largest size before the memory budget counts it. So a call needs a *permit* from
before its message arrives until the budget has counted it; while no permit is free, the message waits at the client.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ..control.settings import ServerSettings
from ..frontend.limits.memory_budget import RETRY_SECONDS, SMALL_BYTES, Allocation
from ..interface.errors import Aborted, Overloaded, RequestError
from .call import Call
from .codec import parsed
from .messages import ModelInferRequest

TICK_SECONDS = 1.0  # seconds between checks for permits that last too long


class Message:
    """One message, held until it is received.

    ``counted`` is called when the message is in the memory budget or its request is over, perhaps more than once."""

    def __init__(self, data: bytes, counted: Callable[[], None] | None = None) -> None:
        self.data = data
        self.size = len(data)
        self._counted = counted
        self._id: str | None = None

    @property
    def id(self) -> str:
        """The request's id, "" if it has none."""
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
        """Return the model and version that the message names. Raises ``RequestError``."""
        asked = parsed(self.data, ModelInferRequest)
        self._id = str(asked.id)
        return asked.model_name, asked.model_version

    def receive(self, allocation: Allocation) -> bytes:
        """Return the message's bytes after adding them to the memory budget. This object no longer holds them."""
        data, self.data = self.data, b""
        try:
            allocation.grow(self.size)
        finally:
            self.counted()
        return data


class Permit:
    """The permit of ``call``, held since the time ``since``; ``arrived`` says whether its message has arrived."""

    def __init__(self, call: Call, caller: str, release: Callable[[Permit], None]) -> None:
        self.call, self.caller, self.since = call, caller, time.monotonic()
        self.arrived = False
        self._release = release

    def release(self) -> None:
        """Release the permit. Idempotent."""
        self._release(self)


class ReceiveLimiter:
    """At most ``total`` permits at once, of which ``per_caller`` for one caller. Used by many threads.

    A call that has waited ``max_wait`` seconds for a permit is refused. A call whose message has not arrived within
    that time is cancelled while others wait."""

    def __init__(self, *, total: int, per_caller: int, max_wait: float) -> None:
        self.total, self.per_caller, self.max_wait = total, per_caller, max_wait
        self._changed = threading.Condition()
        self.permits: set[Permit] = set()

    @staticmethod
    def of(settings: ServerSettings) -> ReceiveLimiter:
        """Return a limiter for as many messages of the largest size as fit into the memory budget."""
        largest = settings.max_body_bytes
        return ReceiveLimiter(
            total=max(2, settings.max_held_bytes // largest),
            per_caller=max(1, settings.max_caller_bytes // largest),
            max_wait=settings.io_timeout,
        )

    @contextlib.contextmanager
    def permit(self, call: Call, caller: str) -> Iterator[Permit]:
        """Wait for a permit and hold it for the ``with`` block; it may end earlier.

        Raises ``Overloaded``, and ``Aborted`` if the call has ended."""
        permit = self._begin(call, caller)
        try:
            yield permit
        finally:
            permit.release()

    def _begin(self, call: Call, caller: str) -> Permit:
        with self._changed:
            until = time.monotonic() + self.max_wait
            while not self._has_room(caller):
                now = time.monotonic()
                if call.is_over:
                    raise Aborted("the client went away")
                if now >= until:
                    raise Overloaded(
                        "body: too many large requests are being read; try again", retry_after=RETRY_SECONDS
                    )
                for permit in self.permits:
                    if not permit.arrived and now - permit.since > self.max_wait:
                        permit.call.context.cancel()
                self._changed.wait(min(TICK_SECONDS, until - now))
            mine = Permit(call, caller, self._finish)
            self.permits.add(mine)
            return mine

    def _has_room(self, caller: str) -> bool:
        own = sum(permit.caller == caller for permit in self.permits)
        return len(self.permits) < self.total and own < self.per_caller

    def _finish(self, permit: Permit) -> None:
        with self._changed:
            if permit in self.permits:
                self.permits.remove(permit)
                self._changed.notify_all()


def is_small(data: bytes) -> bool:
    """Return whether a message is so small that the memory budget does not count it."""
    return len(data) <= SMALL_BYTES
