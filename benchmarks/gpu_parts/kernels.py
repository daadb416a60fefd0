"""Device time by kernel, of a long prompt and of decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .bursts import Engine
from .floor import synchronize
from .plan import Plan, Record

STEPS = 20


def profiles(plan: Plan, engine: Engine) -> Iterator[Record]:
    """Yield a profile of the longest prompt alone, and of steps with the fewest sequences and with the features'."""
    length = max(length for _, length in plan.prefills)
    yield profile(plan.device, f"a prompt of {length:,}", 1, lambda: engine.prefill(1, length))
    for count in sorted({min(plan.sequences), plan.batch}):
        engine.add(count, plan.prompt, STEPS + 12)
        engine.until_decoding()
        engine.steps(4)  # what the first steps do is not of a step
        yield profile(plan.device, f"a step of {count}", STEPS, lambda: engine.steps(STEPS))
        engine.drain()


def profile(device: str, what: str, repeats: int, run: Callable[[], Any]) -> Record:
    """Return milliseconds by kernel (on a CPU: by operator) of one of ``repeats``, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([] if device == "cpu" else [ProfilerActivity.CUDA])
    kind = "CPU" if device == "cpu" else "CUDA"
    with profile(activities=activities, acc_events=True) as recorded:
        began = time.perf_counter()
        run()
        synchronize(device)
        wall = time.perf_counter() - began
    events = [event for event in recorded.key_averages() if event.device_type.name == kind]
    return {
        "part": "profile",
        "what": what,
        "wall_ms": wall / repeats * 1e3,
        "device_ms": sum(map(spent, events)) / repeats / 1e3,
        "kernels": [
            {"kernel": event.key, "calls": event.count / repeats, "ms": spent(event) / repeats / 1e3}
            for event in sorted(events, key=spent, reverse=True)
            if spent(event)
        ],
    }


def spent(event: Any) -> float:
    """Return microseconds of a kernel, or of an operator on a CPU without those that it called."""
    return float(event.self_device_time_total if event.device_type.name == "CUDA" else event.self_cpu_time_total)
