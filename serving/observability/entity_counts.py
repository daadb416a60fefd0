"""The counts that the workers of this server keep of one served entity, read from their files of metrics.

The controller process reads it for canaries. It does not import the metrics themselves, which would count for it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from ..interface.canary import EntityCounts
from .worker_counters import counters_locked

REQUESTS = "mlflow_llm_requests_total"
TTFT = "mlflow_llm_time_to_first_token_seconds_bucket"
TPOT = "mlflow_llm_time_per_output_token_seconds_bucket"


def entity_counts(directory: Path, endpoint: str, entity: str) -> EntityCounts:
    """Return the counts of ``entity``, of all workers that there were. Raises ``OSError`` if the directory is gone."""
    statuses: Counter[str] = Counter()
    buckets: dict[str, Counter[str]] = {TTFT: Counter(), TPOT: Counter()}
    with counters_locked(directory, exclusive=False):
        for path in (*directory.glob("counter_*.db"), *directory.glob("histogram_*.db")):
            if not path.stat().st_size:
                continue  # nothing was ever counted
            for key, value, *_ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                _, name, labels, _ = json.loads(key)
                if (labels.get("endpoint"), labels.get("entity")) != (endpoint, entity):
                    continue
                if name == REQUESTS:
                    statuses[labels["status"]] += int(value)
                elif name in buckets:
                    buckets[name][labels["le"]] += int(value)
    errors = sum(number for status, number in statuses.items() if status >= "500")
    return EntityCounts(
        entity=entity,
        requests=errors + sum(number for status, number in statuses.items() if status < "400"),
        errors=errors,
        ttft=dict(buckets[TTFT]),
        tpot=dict(buckets[TPOT]),
    )
