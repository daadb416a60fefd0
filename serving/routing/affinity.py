"""The replica for a request: one that has read the beginning of its prompt before, or has its adapter, unless it is
busier than others.

The order in which replicas are tried is a function of the request alone (rendezvous hashing, Thaler and Ravishankar
1996), so that all workers of all gateways send the same prefix to the same replica without telling each other. A
replica that has far more than its share of the requests is passed over (consistent hashing with bounded loads, Mirrokni
et al. 2018), for the next one in the same order. A prefix that many requests have is spread over several replicas: it
pays to have it in each of their caches.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable

from ..interface.request import ValidRequest

PREFIX_TOKENS = 256
"""So many tokens tell one prefix from others; a shorter prompt costs too little to be sent where it was before."""
MAX_LOAD_FACTOR = 1.75
"""A replica may have so many times the mean number of requests."""
MIN_BOUND_REQUESTS = 4
"""So many requests are never too many: an engine computes them in one step."""
RECENT_REQUESTS = 512
"""Requests by which it is known how many have the same prefix."""
MIN_PREFIX_REQUESTS = 128
"""With fewer requests, no prefix counts as one that many have."""
REPLICA_FACTOR = 1.5
"""A prefix has so many times the replicas that its share of the requests needs."""


def affinity_of(request: ValidRequest) -> bytes | None:
    """Return what decides the order of replicas for ``request``; None if it fits one as well as another."""
    tokens = request.sequences[0].prompt_token_ids
    found = hashlib.blake2b(f"{request.adapter or ''}\n{request.cache_salt or ''}\n".encode(), digest_size=16)
    if len(tokens) >= PREFIX_TOKENS:
        found.update(array("q", tokens[:PREFIX_TOKENS]).tobytes())
    elif request.adapter is None:
        return None
    return found.digest()


def score(address: str, affinity: bytes) -> bytes:
    """Return the weight of a replica in the order of ``affinity``; the greatest comes first."""
    return hashlib.blake2b(address.encode() + b"\n" + affinity, digest_size=8).digest()


class Affinity:
    """One worker's choice of replicas, which remembers what the last requests had in common."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque()
        self._counts: Counter[bytes] = Counter()

    def choose(self, request: ValidRequest, loads: Iterable[tuple[str, int]]) -> str:
        """Return the address of a replica for ``request``, from the addresses of all and how many requests each has."""
        replicas = list(loads)
        affinity = affinity_of(request)
        if affinity is None:
            return min(replicas, key=lambda one: one[1])[0]
        bound = max(MIN_BOUND_REQUESTS, MAX_LOAD_FACTOR * (sum(load for _, load in replicas) + 1) / len(replicas))
        fitting = [one for one in replicas if one[1] < bound]
        fitting.sort(key=lambda one: score(one[0], affinity), reverse=True)
        number = math.ceil(self._share(affinity) * len(replicas) * REPLICA_FACTOR)
        return min(fitting[: max(number, 1)], key=lambda one: one[1])[0]

    def _share(self, affinity: bytes) -> float:
        """Return the share of the last requests that have this affinity, with the one that has just come."""
        self._recent.append(affinity)
        self._counts[affinity] += 1
        if len(self._recent) > RECENT_REQUESTS:
            first = self._recent.popleft()
            self._counts[first] -= 1
            if not self._counts[first]:
                del self._counts[first]
        return self._counts[affinity] / max(len(self._recent), MIN_PREFIX_REQUESTS)
