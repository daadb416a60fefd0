"""A token bucket of refusals per caller: a caller whose requests are refused again and again gets a 429 at once.

Every 4xx response takes a token. If none is left, the requests of an API key or token get a 429 before their body is
read. Those of a stranger (without a key, or with one that has not been valid here before) get it before the key is
looked up in the store, which is the most expensive step.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...interface.errors import LimitExceeded

# Callers, and likewise credentials, that are remembered; the least recently seen are dropped first.
MAX_CALLERS = 10_000


@dataclass(slots=True)
class _TokenBucket:
    level: float
    at: float


class RefusalLimit:
    """A limit that allows each caller ``rate`` refusals per minute in this worker, in a burst or spread out; 0 means no
    limit."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._buckets: OrderedDict[str, _TokenBucket] = OrderedDict()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def check(self, caller: str, what: str) -> None:
        """Raise ``LimitExceeded`` if ``caller`` has no refusal left. The message calls the caller a ``what``."""
        bucket = self._buckets.get(caller)
        if bucket is None or not self.rate or (level := self._refilled(bucket)) >= 1:
            return
        wait = (1 - level) * 60 / self.rate
        text = f"refusals: more than {self.rate} requests a minute of this {what} were refused"
        raise LimitExceeded(f"{text}; try again in {max(1, round(wait))} s", limit="refusals", retry_after=wait)

    def check_stranger(self, address: str, credential: str) -> None:
        """Check ``address``, unless ``credential`` (a header) has been valid before: known callers are not affected by
        strangers behind the same proxy."""
        if not credential or _digest(credential) not in self._good:
            self.check(address, "address")

    def charge(self, caller: str) -> None:
        """Take a token from ``caller``, because one more of its requests was refused."""
        bucket = self._buckets.pop(caller, None)
        level = float(self.rate) if bucket is None else self._refilled(bucket)
        self._buckets[caller] = _TokenBucket(max(0.0, level - 1), self._clock())
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)

    def remember_good(self, credential: str) -> None:
        digest = _digest(credential)
        self._good[digest] = None
        self._good.move_to_end(digest)
        if len(self._good) > MAX_CALLERS:
            self._good.popitem(last=False)

    def _refilled(self, bucket: _TokenBucket) -> float:
        return min(float(self.rate), bucket.level + (self._clock() - bucket.at) * self.rate / 60)


def _digest(credential: str) -> bytes:
    return hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()
