"""The traffic split chooses a served entity by integer percentages: by a sticky key, else exactly in the long run."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading

from ..endpoints.config import Route

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: its multiples fill the circle evenly


class TrafficSplit:
    """One worker's view of an endpoint's routes. Immutable except for a counter; thread-safe.

    With a ``sticky_key`` the choice is a pure function of (endpoint, key): it is the same in every worker, and changes
    only where percentages change. Without one, requests follow a golden-ratio sequence from a random start: among any n
    requests of a worker, each share is within a few requests of its percentage, and clients cannot exploit a pattern.
    """

    def __init__(self, endpoint: str, routes: tuple[Route, ...], *, start: int) -> None:
        self._endpoint = endpoint
        self._routes = routes
        self._start = start
        self._counter = itertools.count()
        self._lock = threading.Lock()

    @classmethod
    def starting_anywhere(cls, endpoint: str, routes: tuple[Route, ...]) -> TrafficSplit:
        """Make a split with a random start; each worker makes its own."""
        return cls(endpoint, routes, start=secrets.randbits(64))

    def choose(self, sticky_key: str | None = None) -> str:
        """Return the name of the chosen served entity."""
        if sticky_key is None:
            with self._lock:
                number = next(self._counter)
            point = (self._start + number * _GOLDEN) % 2**64
        else:
            digest = hashlib.blake2b(f"{self._endpoint}\n{sticky_key}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest, "big")
        percent = point * 100 // 2**64
        for route in self._routes:
            percent -= route.traffic_percentage
            if percent < 0:
                return route.served_model_name
        raise AssertionError("percentages sum to 100")
