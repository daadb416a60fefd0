"""The cost of metering a request: reserve, count 64 tokens one by one, settle. Also written to results/.

It runs as in a server's worker: on gevent's loop, transactions on threads of their own. ``--plain`` leaves both out.

python benchmarks/ledger_cost.py [--requests 2000] [--plain] [--url sqlite:////path or postgresql://…]
"""

from __future__ import annotations

import sys

if "--plain" not in sys.argv:  # before any import that creates a lock
    from gevent import monkey

    monkey.patch_all()

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from mlflow_llm.serving.frontend.background.store_threads import StoreThreads
from mlflow_llm.serving.metering.accounts.limits import Limits
from mlflow_llm.serving.metering.accounts.money import Price
from mlflow_llm.serving.metering.ledger.lease import Reservation
from mlflow_llm.serving.metering.ledger.ledger import Ledger
from mlflow_llm.serving.metering.store.store import Store


def one_request(ledger: Ledger, request_id: str) -> float:
    """Return the milliseconds that metering takes for one request of 64 generated tokens."""
    reservation = Reservation(
        request_id=request_id,
        key_id="key_1",
        tenant="tenant",
        endpoint="chat",
        entity="model-1",
        mode="pay_per_token",
        task="chat",
        input_tokens=100,
        max_output_tokens=256,
    )
    began = time.perf_counter()
    with ledger.reserve(reservation) as lease:
        for _ in range(64):
            lease.count(1)
    return (time.perf_counter() - began) * 1000


def run(ledger: Ledger, requests: int, tag: str) -> dict[str, float]:
    """Measure wall time, and CPU time of all threads, which other work on the machine disturbs less."""
    began = time.process_time()
    times = [one_request(ledger, f"{tag}-{number}") for number in range(requests)]
    cpu = (time.process_time() - began) * 1000 / requests
    cuts = statistics.quantiles(times, n=100)
    named = {"median_ms": cuts[49], "p95_ms": cuts[94], "p99_ms": cuts[98], "cpu_ms": cpu}
    return {name: round(value, 3) for name, value in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--url", default=None)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        url = options.url or f"sqlite:///{directory}/metering.db"
        store = Store(url) if options.plain else Store(url, run=StoreThreads.for_url(url))
        ledger = Ledger(store, state_dir=directory)
        ledger.prices.set("model-1", Price(input=3_000_000, cached=300_000, output=15_000_000))
        figures: dict[str, object] = {"no_limits": run(ledger, options.requests, f"a{time.time_ns()}")}
        limits = Limits(store)
        for scope, subject in (("key", "key_1"), ("tenant", "tenant"), ("endpoint", "chat")):
            for kind in ("itpm", "otpm", "qph", "in_flight", "budget"):
                limits.set(scope, subject, kind, 2**50)
        figures["15_limits"] = run(ledger, options.requests, f"b{time.time_ns()}")
        ledger.close()
        store.close()
    figures["where"] = "plain" if options.plain else "worker"
    print(json.dumps(figures, indent=2))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / f"ledger_cost_{figures['where']}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
