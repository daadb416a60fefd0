"""A closed loop of callers on a chat endpoint: each sends its next request when the last one is complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import click
from msgspec import Struct

from .http import Client


class Sample(Struct, frozen=True, kw_only=True):
    """One request: seconds to the first token, seconds between later ones (mean), in all; tokens of its usage."""

    ttft: float
    tpot: float
    e2e: float
    tokens: int


class Result(Struct, frozen=True, kw_only=True):
    """``errors`` are messages of requests that failed; ``seconds`` is the wall time of the whole."""

    concurrency: int
    samples: tuple[Sample, ...]
    errors: tuple[str, ...]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Percentiles in milliseconds, throughput in tokens/s and requests/s."""
        found: dict[str, Any] = {
            "concurrency": self.concurrency,
            "requests": len(self.samples),
            "errors": len(self.errors),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(sum(s.tokens for s in self.samples) / self.seconds, 2),
            "requests_per_second": round(len(self.samples) / self.seconds, 3),
        }
        for name in ("ttft", "tpot", "e2e"):
            values = sorted(getattr(sample, name) for sample in self.samples)
            for percent in (50, 90, 99):
                found[f"{name}_p{percent}_ms"] = round(percentile(values, percent) * 1e3, 2) if values else None
        return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted ``values``, which are not empty."""
    rank = -(-len(values) * percent // 100)
    return values[max(0, min(len(values), int(rank)) - 1)]


def run(client: Client, body: dict[str, Any], concurrency: int, requests: int) -> Result:
    """Send ``requests`` streamed chats from ``concurrency`` callers."""
    samples: list[Sample] = []
    errors: list[str] = []
    left = iter(range(requests))
    lock = threading.Lock()

    def caller() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            try:
                sample = one(client, body)
            except (click.ClickException, OSError) as error:
                with lock:
                    errors.append(str(error))
                continue
            with lock:
                samples.append(sample)

    threads = [threading.Thread(target=caller) for _ in range(min(concurrency, requests))]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    return Result(concurrency=concurrency, samples=tuple(samples), errors=tuple(errors), seconds=seconds)


def one(client: Client, body: dict[str, Any]) -> Sample:
    """One streamed request, timed. Tokens are those of the reply's usage."""
    started = time.perf_counter()
    first = last = 0.0
    tokens = 0
    for chunk in client.stream("/v1/chat/completions", body):
        now = time.perf_counter()
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            first, last = first or now, now
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    ended = time.perf_counter()
    first, last = first or ended, last or ended
    return Sample(
        ttft=first - started,
        tpot=(last - first) / (tokens - 1) if tokens > 1 else 0.0,
        e2e=ended - started,
        tokens=tokens,
    )
