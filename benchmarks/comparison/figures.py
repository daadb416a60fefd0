"""Figures of a workload from the times of its tokens, over rounds, beside those of another contender."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run of a workload. Times are milliseconds: TTFT from when a request was due, TPOT a request's
    mean between tokens, gap any pause between two events of a request. None: no data."""

    tokens_per_second: float | None
    tokens_per_cpu_second: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    gap_p99: float | None
    gap_max: float | None
    requests: int
    cut: int
    seconds: float


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, or None of an empty list."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(0, min(len(values), int(rank)) - 1)]


def figures(answer: dict[str, Any], cpu_seconds: float, streams: bool = True) -> Figures:
    """Return the figures of the answer to a "run" message. A contender that does not stream has no times of single
    tokens."""
    first, tpot, gaps = [], [], []
    tokens, ended = 0, 0.0
    for one in answer["answers"]:
        times = [time for time, _ in one["events"]]
        count = sum(number for _, number in one["events"])
        tokens += count
        if not times:
            continue
        ended = max(ended, times[-1])
        first.append(1e3 * (times[0] - one["asked"]))
        gaps += [1e3 * (b - a) for a, b in pairwise(times)]
        if count > 1:
            tpot.append(1e3 * (times[-1] - times[0]) / (count - one["events"][0][1] or 1))
    return Figures(
        tokens_per_second=tokens / ended if ended else None,
        tokens_per_cpu_second=tokens / cpu_seconds if cpu_seconds > 0 and tokens else None,
        ttft_p50=percentile(first, 50) if streams else None,
        ttft_p99=percentile(first, 99) if streams else None,
        tpot_p50=percentile(tpot, 50) if streams else None,
        gap_p99=percentile(gaps, 99) if streams else None,
        gap_max=percentile(gaps, 100) if streams else None,
        requests=len(answer["answers"]),
        cut=answer["cut"],
        seconds=answer["seconds"],
    )


def medians(rounds: Sequence[Figures]) -> dict[str, float | None]:
    """Return each figure's median over rounds, or None if no round has it."""
    found: dict[str, float | None] = {}
    for name in asdict(rounds[0]):
        values = [value for one in rounds if (value := getattr(one, name)) is not None]
        found[name] = statistics.median(values) if values else None
    return found


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], name: str = "tokens_per_second") -> float | None:
    """Return the median over rounds of theirs by ours in the same round."""
    pairs = ((getattr(a, name), getattr(b, name)) for a, b in zip(ours, theirs, strict=False))
    ratios = [b / a for a, b in pairs if a and b]
    return statistics.median(ratios) if ratios else None


def same_at_the_beginning(reference: Sequence[int], tokens: Sequence[int]) -> int:
    same = 0
    for expected, token in zip(reference, tokens, strict=False):
        if expected != token:
            break
        same += 1
    return same
