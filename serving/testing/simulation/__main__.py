"""``python -m mlflow_llm.serving.testing.simulation``: run schedules, or one of them step by step."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from .run import all_outcomes, outcomes
from .schedule import Outcome

CHUNK = 50
"""Schedules that a process takes at a time."""


def main() -> int:
    """Run what the command line says; return 1 if a schedule broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m mlflow_llm.serving.testing.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1_000_000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that run schedules at once")
    parser.add_argument("--seed", type=int, help="run the schedule of this seed alone, and show each step")
    given = parser.parse_args()
    if given.seed is not None:
        return _show(given.seed)
    return _run(given)


def _show(seed: int) -> int:
    (outcome,) = outcomes([seed], trace=print)
    print(outcome.failure or f"seed {seed}: {outcome.steps} steps, nothing was broken")
    return int(bool(outcome.failure))


def _run(given: argparse.Namespace) -> int:
    began, count, steps, requests, failed = time.monotonic(), 0, 0, 0, 0
    for outcome in _outcomes(given):
        count, steps, requests = count + 1, steps + outcome.steps, requests + outcome.requests
        if outcome.failure:
            failed += 1
            print(f"seed {outcome.seed} ({', '.join(outcome.events)}):\n{outcome.failure}\n", flush=True)
        if count % 1000 == 0:
            print(f"{count} schedules, {count / (time.monotonic() - began):.1f} a second, {failed} failed", flush=True)
        if time.monotonic() - began > given.seconds:
            break
    took = time.monotonic() - began
    print(
        f"{count} schedules from seed {given.first} in {took:.0f} s ({count / took:.1f} a second): {requests} requests "
        f"in {steps} steps, {failed} schedules failed"
    )
    return int(failed > 0)


def _outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    seeds = range(given.first, given.first + given.schedules)
    if given.processes == 1:
        yield from outcomes(seeds)
        return
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for found in pool.imap_unordered(all_outcomes, chunks):
            yield from found


if __name__ == "__main__":
    sys.exit(main())
