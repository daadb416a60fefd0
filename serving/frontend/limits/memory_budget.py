"""Memory budget: limits the bytes of requests and replies that a worker holds at once, per caller and in total.

The bytes of a body count from their arrival until the body is tokenised. Decoded images have a budget of their own, in
which they count from before they are decoded until their request is over: an engine that dies is sent them again. Of a
reply that is not streamed, the parts other than generated text count while the reply is being built. A reply that a
guardrail's scorer judges counts whole, as it grows, because all of it is held back, of a stream too. Small bodies and
replies do not count, because the connection limits bound them.
"""

from __future__ import annotations

from gevent.monkey import get_original

from ...interface.errors import LimitExceeded, Overloaded

_Lock = get_original("threading", "Lock")  # between threads; greenlets never switch while they hold it
SMALL_BYTES = 64 * 2**10  # bytes
RETRY_SECONDS = 1.0  # seconds


class Allocation:
    """The bytes of one request in memory, a context manager that releases them. ``what`` is their name in errors."""

    __slots__ = ("_budget", "_caller", "_counted", "_size", "_what")

    def __init__(self, budget: MemoryBudget, caller: str, what: str) -> None:
        self._budget, self._caller, self._what = budget, caller, what
        self._size = self._counted = 0

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def grow(self, size: int) -> None:
        """Count ``size`` more bytes.

        Raises ``LimitExceeded`` if the caller has too much in memory, and ``Overloaded`` if all callers together have.
        """
        self._size += size
        if self._size > SMALL_BYTES:
            self._budget.add(self._caller, self._size - self._counted, self._what)
            self._counted = self._size

    def check(self, size: int) -> None:
        """Raise the errors of ``grow`` if there is no room now for ``size`` bytes that have not arrived yet."""
        if size > SMALL_BYTES:
            self._budget.check(self._caller, size, self._what)

    def release(self) -> None:
        self._budget.remove(self._caller, self._counted)
        self._size = self._counted = 0


class MemoryBudget:
    """A budget of at most ``total`` bytes in memory, and at most ``by_caller`` bytes of one caller: an API key, or an
    address if no keys are required. ``what`` is the name of the bytes in errors, unless an allocation has its own."""

    def __init__(self, *, total: int, by_caller: int, what: str = "body") -> None:
        self.total, self.by_caller, self.what = total, by_caller, what
        self.used = 0
        self.used_by: dict[str, int] = {}
        self._lock = _Lock()  # images are counted on threads too (``offload``)

    def allocate(self, caller: str, what: str | None = None) -> Allocation:
        """Return an allocation for ``caller``, which is released at the end of its context."""
        return Allocation(self, caller, what or self.what)

    def check(self, caller: str, size: int, what: str) -> None:
        own = self.used_by.get(caller, 0)
        if own and own + size > self.by_caller:
            text = f"this caller has {own} bytes of requests in memory, and at most {self.by_caller} at once"
            raise LimitExceeded(f"{what}: {text}; try again in 1 s", limit="body_bytes", retry_after=RETRY_SECONDS)
        if self.used and self.used + size > self.total:
            raise Overloaded(f"{what}: too many large requests are being read; try again", retry_after=RETRY_SECONDS)

    def add(self, caller: str, size: int, what: str) -> None:
        with self._lock:
            self.check(caller, size, what)
            self.used_by[caller] = self.used_by.get(caller, 0) + size
            self.used += size

    def remove(self, caller: str, size: int) -> None:
        if not size:
            return
        with self._lock:
            self.used -= size
            self.used_by[caller] -= size
            if not self.used_by[caller]:
                del self.used_by[caller]
