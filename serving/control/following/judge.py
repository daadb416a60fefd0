"""Judge a canary: a pure function of its settings, what all gateways have counted, its scores and its age."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from ...interface.canary import Canary, EntityCounts

PERCENTILE = 95


class Judgement(Struct, frozen=True, kw_only=True):
    """The end of a canary, and why."""

    ended: Literal["promoted", "rolled_back"]
    reason: str


def judge(
    settings: Canary, counts: EntityCounts, metrics: Mapping[str, float] | None, seconds: float
) -> Judgement | None:
    """Return how a canary of ``seconds`` ends, or None while it goes on.

    ``metrics`` are those that MLflow has of the version; None if they are not known, and then only requests are judged.
    """
    broken = list(_broken(settings, counts))
    if metrics is not None:
        broken += _too_low(settings, metrics)
    if broken:
        return Judgement(ended="rolled_back", reason="; ".join(broken))
    if seconds < settings.duration_s or counts.requests < settings.min_requests:
        return None
    if settings.min_scores and metrics is None:
        return None
    lacking = sorted(settings.min_scores.keys() - (metrics or {}).keys())
    if lacking:
        text = f"MLflow has no metric {', '.join(lacking)} of the version"
        return Judgement(ended="rolled_back", reason=text)
    unjudged = "".join(f"; {text}" for text in _unjudged(settings, counts))
    text = f"no bound was broken by {counts.requests} requests in {seconds:.0f} s{unjudged}"
    return Judgement(ended="promoted", reason=text)


def refused(settings: Canary, metrics: Mapping[str, float]) -> str:
    """Return why a version gets no traffic at all: scores that are too low already; "" if it may begin."""
    return "; ".join(_too_low(settings, metrics))


def _too_low(settings: Canary, metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{name} is {metrics[name]:g}, below {bound:g}"
        for name, bound in settings.min_scores.items()
        if name in metrics and not metrics[name] >= bound  # NaN is below every bound
    ]


def _broken(settings: Canary, counts: EntityCounts) -> Iterator[str]:
    if counts.requests < max(1, settings.min_requests):
        return
    rate = counts.errors / counts.requests
    if settings.max_error_rate is not None and rate > settings.max_error_rate:
        share = f"{counts.errors} of {counts.requests} requests failed"
        yield f"{share}, an error rate of {rate:.3g}, above {settings.max_error_rate:g}"
    for name, bound, buckets in _latencies(settings, counts):
        number = sum(buckets.values())
        slow = sum(count for limit, count in buckets.items() if _lower_limit(limit, buckets) >= bound)
        if number >= max(1, settings.min_requests) and slow * 100 > (100 - PERCENTILE) * number:
            yield f"{slow} of {number} streamed requests had a {name} above {bound:g} s, more than 5 %"


def _unjudged(settings: Canary, counts: EntityCounts) -> Iterator[str]:
    for name, _, buckets in _latencies(settings, counts):
        if sum(buckets.values()) < max(1, settings.min_requests):
            yield f"{name} was not judged, by {sum(buckets.values())} streamed requests"


def _latencies(settings: Canary, counts: EntityCounts) -> Iterator[tuple[str, float, dict[str, int]]]:
    if settings.max_ttft_p95_s is not None:
        yield "time to first token", settings.max_ttft_p95_s, counts.ttft
    if settings.max_tpot_p95_s is not None:
        yield "time per output token", settings.max_tpot_p95_s, counts.tpot


def _lower_limit(limit: str, buckets: Mapping[str, int]) -> float:
    """Return the seconds that every request in the bucket up to ``limit`` took at least."""
    return max((float(other) for other in buckets if float(other) < float(limit)), default=0.0)
