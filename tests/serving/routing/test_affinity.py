"""The replica of a request: by its prefix or adapter, and by how much the replicas have to do."""

from __future__ import annotations

from collections import Counter

import msgspec

from mlflow_llm.serving.interface.engine import Health
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.routing.affinity import MIN_BOUND_REQUESTS, MIN_PREFIX_REQUESTS, PREFIX_TOKENS, Affinity
from mlflow_llm.serving.routing.replica_set import ReplicaSet

ADDRESSES = [f"tcp://engine-{number}:5601" for number in range(4)]


def request(tokens: tuple[int, ...], adapter: str | None = None, salt: str | None = None) -> ValidRequest:
    return ValidRequest(
        request_id="r",
        task="completions",
        model="m",
        sequences=(Sequence(prompt_token_ids=tokens),),
        sampling=Sampling(max_tokens=3, temperature=0.0),
        adapter=adapter,
        cache_salt=salt,
    )


def prefixed(number: int, *more: int) -> ValidRequest:
    """Return a request with the long prefix of this number."""
    return request((number,) * PREFIX_TOKENS + more)


def idle() -> list[tuple[str, int]]:
    return [(address, 0) for address in ADDRESSES]


def test_a_prefix_has_the_same_replica_everywhere() -> None:
    """Workers that know nothing of each other send a prefix to the same replica, in whatever order they list them;
    many prefixes are spread over all.
    """
    one, other = Affinity(), Affinity()
    homes = [one.choose(prefixed(number), idle()) for number in range(200)]
    assert [other.choose(prefixed(number, number), idle()[::-1]) for number in range(200)] == homes
    assert min(Counter(homes).values()) > 25
    salted = {Affinity().choose(request((1,) * PREFIX_TOKENS, salt=str(salt)), idle()) for salt in range(50)}
    assert salted == set(ADDRESSES)  # callers that share no cache need no replica in common


def test_an_adapter_has_a_replica_and_a_short_prompt_has_none() -> None:
    """Short requests of an adapter go to one replica; others go where there is least to do."""
    homes = {Affinity().choose(request((1, 2, number), adapter="legal"), idle()) for number in range(20)}
    assert len(homes) == 1
    assert len({Affinity().choose(request((1,), adapter=str(number)), idle()) for number in range(50)}) == 4
    loads = list(zip(ADDRESSES, (3, 1, 2, 3), strict=True))
    assert Affinity().choose(request((1, 2)), loads) == ADDRESSES[1]


def test_a_busy_replica_is_passed_over() -> None:
    """A replica with far more than the mean of the requests gets no more by affinity; with few it always does."""
    home = Affinity().choose(prefixed(1), idle())
    second = Affinity().choose(prefixed(1), [one for one in idle() if one[0] != home])
    few = [(address, MIN_BOUND_REQUESTS - 1 if address == home else 0) for address in ADDRESSES]
    assert Affinity().choose(prefixed(1), few) == home
    many = [(address, 20 if address == home else 5) for address in ADDRESSES]
    assert Affinity().choose(prefixed(1), many) == second


def test_a_prefix_of_most_requests_uses_all_replicas() -> None:
    """A prefix that all requests have is spread over all replicas by what they have to do."""
    affinity, loads = Affinity(), dict.fromkeys(ADDRESSES, 0)
    for _ in range(4 * MIN_PREFIX_REQUESTS):
        loads[affinity.choose(prefixed(1), loads.items())] += 1
    assert max(loads.values()) < 1.3 * MIN_PREFIX_REQUESTS


class Said:
    """An engine that says how many requests it has, and holds what it gets."""

    def __init__(self) -> None:
        self.said = Health(status="ready")
        self.streams: list[Said] = []
        self.is_over = False

    def health(self) -> Health:
        return self.said

    def submit(self, request: ValidRequest) -> Said:
        self.streams.append(Said())
        return self.streams[-1]


def test_the_load_is_that_of_all_gateways() -> None:
    """A replica counts with what its engine has said of all gateways' requests, and this worker's since then."""
    one, other = Said(), Said()
    found = ReplicaSet(None, (), open={"one": one, "other": other}.__getitem__, request_replica=lambda: None)  # type: ignore[arg-type]
    found.set_addresses(("one", "other"))
    one.said = msgspec.structs.replace(one.said, steps=1, num_running=3)  # of another gateway
    for _ in range(3):
        found.submit(request((1,)))
    assert (len(one.streams), len(other.streams)) == (0, 3)
    other.said = msgspec.structs.replace(other.said, steps=1, num_running=3)  # they are among these
    found.submit(request((1,)))
    found.submit(request((1,)))
    assert (len(one.streams), len(other.streams)) == (1, 4)
