"""A load generator: a closed loop of callers, each of which sends its next request when the last is complete."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from msgspec import Struct

from .http import Client

Body = dict[str, Any]
TOPICS = ("rivers", "trains", "bread", "chess", "winter", "bridges", "maps", "clocks", "violins", "gardens", "salt")
TEXT = (
    "how people in small towns looked after them and what a visitor would have noticed first begin with the oldest "
    "records then go on in order of time and finish with the present day what they cost who paid and why it changed"
)


class Sample(Struct, frozen=True, kw_only=True):
    """The times of one request in seconds, and its token counts by the reply's usage.

    TTFT is to the first text (None where the reply is not streamed), TPOT the mean between later tokens (None for fewer
    than two)."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float
    prompt_tokens: int
    tokens: int


class Result(Struct, frozen=True, kw_only=True):
    """``errors`` are messages of requests that failed; ``seconds`` is the wall time of the whole."""

    concurrency: int
    samples: tuple[Sample, ...]
    errors: tuple[str, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(sample.tokens for sample in self.samples) / self.seconds

    def summary(self) -> dict[str, Any]:
        """Return percentiles in milliseconds, throughput in generated tokens/s and requests/s."""
        found: dict[str, Any] = {
            "concurrency": self.concurrency,
            "requests": len(self.samples),
            "errors": len(self.errors),
            "seconds": round(self.seconds, 3),
            "prompt_tokens": sum(sample.prompt_tokens for sample in self.samples),
            "completion_tokens": sum(sample.tokens for sample in self.samples),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "requests_per_second": round(len(self.samples) / self.seconds, 3),
        }
        for name in ("ttft", "tpot", "e2e"):
            values = sorted(v for sample in self.samples if (v := getattr(sample, name)) is not None)
            for percent in (50, 90, 99):
                found[f"{name}_p{percent}_ms"] = round(percentile(values, percent) * 1e3, 2) if values else None
        return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted ``values``, which are not empty."""
    rank = -(-len(values) * percent // 100)
    return values[max(0, min(len(values), int(rank)) - 1)]


def prompt(number: int, words: int) -> str:
    """Return a prompt of about ``words`` words, with another beginning for each ``number``: it hits no prefix cache."""
    draw = random.Random(number)
    rest = draw.choices(TEXT.split(), k=max(0, words - 4))
    return " ".join([str(number), draw.choice(TOPICS), "and", draw.choice(TOPICS), *rest])


def closed_loop(ask: Callable[[Body], Sample], bodies: Iterable[Body], concurrency: int) -> Result:
    """Send all ``bodies`` with ``ask``, ``concurrency`` at once. A request that fails is counted, not repeated."""
    samples: list[Sample] = []
    errors: list[str] = []
    left = iter(bodies)
    lock = threading.Lock()

    def caller() -> None:
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return
            try:
                sample = ask(body)
            except click.ClickException as error:
                with lock:
                    errors.append(error.message)
                continue
            with lock:
                samples.append(sample)

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    return Result(concurrency=concurrency, samples=tuple(samples), errors=tuple(errors), seconds=seconds)


def streamed(client: Client, body: Body, path: str = "/v1/chat/completions") -> Sample:
    """Measure one streamed chat; ``body`` asks for a stream with usage. Raises ``ClickException``."""
    started = time.perf_counter()
    first = last = 0.0
    usage: dict[str, Any] = {}
    for chunk in client.stream(path, body):
        now = time.perf_counter()
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            first, last = first or now, now
        usage = chunk.get("usage") or usage
    ended = time.perf_counter()
    tokens = usage.get("completion_tokens", 0)
    return Sample(
        ttft=(first or ended) - started,
        tpot=(last - first) / (tokens - 1) if tokens > 1 else None,
        e2e=ended - started,
        prompt_tokens=usage.get("prompt_tokens", 0),
        tokens=tokens,
    )


def whole(client: Client, body: Body, path: str = "/v1/chat/completions") -> Sample:
    """Measure one request that is not streamed. Raises ``ClickException``."""
    started = time.perf_counter()
    usage = client.post(path, body)["usage"]
    return Sample(
        e2e=time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage.get("completion_tokens", 0),
    )
