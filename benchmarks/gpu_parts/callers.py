"""Callers of a server, each with a connection of its own; many of them in several processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from streams import closed_loop

MANY = 16  # callers from which on they are shared by processes


class Callers:
    """Callers of the server at ``port``. With ``processes``, each of them has its share of many callers."""

    def __init__(self, port: int, processes: int = 0) -> None:
        self._port = port
        spawn = get_context("spawn")
        # One worker each: in one pool, a worker could take two shares, one after the other.
        self._pools = [ProcessPoolExecutor(1, mp_context=spawn) for _ in range(processes)]

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def rate(self, requests: list[bytes], new: int) -> float:
        """Send all requests at once; return tokens per second from the first's beginning to the last's end."""
        if not self._pools or len(requests) < MANY:
            spans = [ask(self._port, requests)]
        else:
            shares = [requests[place :: len(self._pools)] for place in range(len(self._pools))]
            asked = [pool.submit(ask, self._port, share) for pool, share in zip(self._pools, shares, strict=True)]
            spans = [one.result() for one in asked]
        return len(requests) * new / (max(end for _, end in spans) - min(began for began, _ in spans))


def ask(port: int, requests: list[bytes]) -> tuple[float, float]:
    """Send ``requests``, each on a connection of its own; return when the first began and the last ended."""
    calls, _ = closed_loop(port, requests, len(requests), streamed=True)
    return min(call.started for call in calls), max(call.ended for call in calls)
