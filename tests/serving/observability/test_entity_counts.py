"""The counts of a served entity, read by another process than those that count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mlflow_llm.serving.interface.canary import EntityCounts
from mlflow_llm.serving.observability.entity_counts import entity_counts
from mlflow_llm.serving.observability.worker_counters import merge_ended

COUNT = """
from mlflow_llm.serving.observability import metrics
for status, count in (("200", 5), ("304", 1), ("400", 7), ("429", 1), ("499", 2), ("500", 3), ("503", 1)):
    metrics.REQUESTS.labels("chat", "main~2-3fa0", "", "chat", status).inc(count)
metrics.REQUESTS.labels("chat", "main", "", "chat", "500").inc(100)
metrics.REQUESTS.labels("other", "main~2-3fa0", "", "chat", "500").inc(100)
for adapter, seconds in (("", 0.3), ("pirate", 0.3), ("", 700.0)):
    metrics.TTFT.labels("chat", "main~2-3fa0", adapter).observe(seconds)
metrics.TPOT.labels("chat", "main~2-3fa0", "").observe(0.04)
"""


def count(directory: Path) -> int:
    """Count in a process of its own, as a worker does, and return its id."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    with subprocess.Popen([sys.executable, "-c", COUNT], env=environment) as worker:
        assert worker.wait(240) == 0
    return worker.pid


def test_the_counts_of_all_workers_are_added_up(tmp_path: Path) -> None:
    """The counts of ended workers are among them; errors of callers count neither as errors nor as requests."""
    merge_ended(tmp_path, count(tmp_path))
    count(tmp_path)
    found = entity_counts(tmp_path, "chat", "main~2-3fa0")
    assert (found.requests, found.errors) == (20, 8)
    assert {limit: number for limit, number in found.ttft.items() if number} == {"0.5": 4, "+Inf": 2}
    assert {limit: number for limit, number in found.tpot.items() if number} == {"0.05": 2}
    assert entity_counts(tmp_path, "chat", "main~3-3fa0") == EntityCounts(entity="main~3-3fa0")
