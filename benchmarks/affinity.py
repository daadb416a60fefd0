"""Routing by prefix: four engines against one with four times the memory, and against round robin, in simulated time.

Tenants with system prompts of their own send requests at random times through several gateways, each of which has the
real replica set. An engine is simulated: it computes one prompt after the other at a fixed rate, except for what is in
its prefix cache, which forgets the prompt that was used least recently; then it generates at a fixed pace. Engines say
how busy they are twice a second, as real ones do. Nothing is measured by a wall clock, so that the figures are the same
on every machine.

    python benchmarks/affinity.py
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlflow_llm.serving.interface.engine import Health
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.routing.replica_set import ReplicaSet

BEAT = 0.5  # seconds between what engines say


@dataclass
class Load:
    """The requests: ``rate`` a second from all tenants together, and what an engine takes for one."""

    tenants: int = 150
    prefix: int = 6000
    own: int = 60
    rate: float = 12.0
    requests: int = 6000
    prefill: float = 20_000.0  # tokens a second
    decode: float = 4.0  # seconds that a reply takes
    skew: float = 0.0  # the share of requests that the first tenant has beside its part of the others
    seed: int = 0


class Stream:
    """A stream of a simulated engine."""

    def __init__(self) -> None:
        self.is_over = False


@dataclass
class SimulatedEngine:
    """An engine with a prefix cache of ``memory`` tokens. ``now`` is simulated time."""

    load: Load
    memory: int
    now: Callable[[], float]
    free_at: float = 0.0
    hits: int = 0
    asked: int = 0
    running: list[tuple[float, int, Stream]] = field(default_factory=list)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    said: Health = field(default_factory=lambda: Health(status="ready"))
    first_tokens: list[float] = field(default_factory=list)
    served: int = 0
    most: int = 0

    def health(self) -> Health:
        return self.said

    def submit(self, request: ValidRequest) -> Stream:
        tenant, length = request.sequences[0].prompt_token_ids[0], len(request.sequences[0].prompt_token_ids)
        cached = self.cache.pop(tenant, 0)
        self.hits, self.asked = self.hits + cached, self.asked + length
        self.cache[tenant] = self.load.prefix
        while sum(self.cache.values()) > self.memory:
            self.cache.popitem(last=False)
        began = max(self.free_at, self.now())
        self.free_at = began + (length - cached) / self.load.prefill
        self.first_tokens.append(self.free_at - self.now())
        self.served += 1
        stream = Stream()
        heapq.heappush(self.running, (self.free_at + self.load.decode, self.served, stream))
        self.most = max(self.most, len(self.running))
        return stream

    def advance(self) -> None:
        """End the requests that are over by now."""
        while self.running and self.running[0][0] <= self.now():
            heapq.heappop(self.running)[2].is_over = True

    def beat(self) -> None:
        """Say how many requests there are."""
        self.said = Health(status="ready", steps=self.said.steps + 1, num_running=len(self.running))


@dataclass
class Result:
    """The figures of a run: the share of tokens found in caches, the 90th percentile of the time to the first token in
    seconds, and the requests of the busiest engine over the mean."""

    hit_rate: float
    ttft_p90: float
    busiest: float


def simulate(load: Load, engines: int, memory: int, *, gateways: int = 4, round_robin: bool = False) -> Result:
    """Run ``load`` over engines that have ``memory`` tokens together."""
    clock = SimpleNamespace(now=0.0)
    each = {f"tcp://engine-{i}:5601": SimulatedEngine(load, memory // engines, lambda: clock.now)
            for i in range(engines)}  # fmt: skip
    sets = [_replica_set(each) for _ in range(gateways)]
    rotation, beats = itertools.cycle(each.values()), 0.0
    held: list[Any] = []  # the sets know streams only as long as somebody holds them
    for at, request in _arrivals(load):
        while beats <= at:
            clock.now = beats
            for engine in each.values():
                engine.advance()
                engine.beat()
            beats += BEAT
        clock.now = at
        for engine in each.values():
            engine.advance()
        chosen: Any = next(rotation) if round_robin else sets[len(held) % gateways]
        held.append(chosen.submit(request))
    first = [seconds for engine in each.values() for seconds in engine.first_tokens]
    served = [engine.served for engine in each.values()]
    asked, hits = (sum(getattr(engine, name) for engine in each.values()) for name in ("asked", "hits"))
    return Result(hits / asked, statistics.quantiles(first, n=10)[-1], max(served) / statistics.mean(served))


def _replica_set(engines: dict[str, SimulatedEngine]) -> ReplicaSet:
    open_engine: Any = engines.__getitem__
    info: Any = None  # nothing here asks for it
    found = ReplicaSet(info, (), open=open_engine, request_replica=lambda: None)
    found.set_addresses(tuple(engines))
    return found


def _arrivals(load: Load) -> Iterator[tuple[float, ValidRequest]]:
    chance, at = random.Random(load.seed), 0.0
    for number in range(load.requests):
        at += chance.expovariate(load.rate)
        tenant = 0 if chance.random() < load.skew else chance.randrange(load.tenants)
        prompt = (tenant,) * load.prefix + (1000 + number,) * load.own
        sampling = Sampling(max_tokens=100, temperature=0.0)
        sequences = (Sequence(prompt_token_ids=prompt),)
        yield at, ValidRequest(request_id=f"r{number}", task="chat", model="m", sequences=sequences, sampling=sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=150)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--memory", type=int, default=1_200_000, help="tokens of all prefix caches together")
    parser.add_argument("--skew", type=float, default=0.0, help="share of requests of one of the tenants alone")
    args = parser.parse_args()
    load = Load(tenants=args.tenants, rate=args.rate, skew=args.skew)
    rows = {
        "one engine": simulate(load, 1, args.memory),
        "four, by prefix": simulate(load, 4, args.memory),
        "four, round robin": simulate(load, 4, args.memory, round_robin=True),
    }
    print("| | hit rate | TTFT p90, s | busiest / mean |\n|---|---|---|---|")
    for name, one in rows.items():
        print(f"| {name} | {one.hit_rate:.3f} | {one.ttft_p90:.3f} | {one.busiest:.2f} |")


if __name__ == "__main__":
    main()
