"""How many bytes of requests and of their replies a worker may have in memory at once, by caller and in all.

A body counts as it comes, until it is tokenised; a reply that is not streamed with what it has beside generated text,
while it is made. Small ones are not counted: the number of connections bounds those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import LimitExceeded, Overloaded

SMALL = 64 * 2**10
RETRY_AFTER = 1.0


class Held:
    """What one request has in memory: ``more`` counts bytes in before they are there."""

    def __init__(self, intake: Intake, caller: str) -> None:
        self._intake, self._caller = intake, caller
        self._size = self._counted = 0

    def more(self, size: int) -> None:
        """Raises ``LimitExceeded`` where the caller has too much in memory, ``Overloaded`` where all have."""
        self._size += size
        if self._size > SMALL:
            self._intake.add(self._caller, self._size - self._counted)
            self._counted = self._size

    def check(self, size: int) -> None:
        """Whether ``size`` bytes that have not come yet have room now. Raises as ``more``."""
        if size > SMALL:
            self._intake.check(self._caller, size)

    def give_back(self) -> None:
        self._intake.remove(self._caller, self._counted)
        self._size = self._counted = 0


class Intake:
    """``most`` bytes in all, ``most_each`` of one caller: an API key, or an address where no keys are asked for."""

    def __init__(self, *, most: int, most_each: int) -> None:
        self.most, self.most_each = most, most_each
        self.held = 0
        self._of: dict[str, int] = {}

    @contextmanager
    def holding(self, caller: str) -> Iterator[Held]:
        held = Held(self, caller)
        try:
            yield held
        finally:
            held.give_back()

    def check(self, caller: str, size: int) -> None:
        own = self._of.get(caller, 0)
        if own and own + size > self.most_each:
            text = f"body: this caller has {own} bytes of requests in memory, and at most {self.most_each} at once"
            raise LimitExceeded(f"{text}; try again in 1 s", limit="body_bytes", retry_after=RETRY_AFTER)
        if self.held and self.held + size > self.most:
            raise Overloaded("body: too many large requests are being read; try again", retry_after=RETRY_AFTER)

    def add(self, caller: str, size: int) -> None:
        self.check(caller, size)
        self._of[caller] = self._of.get(caller, 0) + size
        self.held += size

    def remove(self, caller: str, size: int) -> None:
        if size:
            self.held -= size
            self._of[caller] -= size
            if not self._of[caller]:
                del self._of[caller]
