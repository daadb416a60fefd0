from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import sqlite3, sys, time
import gevent
from mlflow_llm.serving.metering import Ledger, Limits, Reservation, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.limits import check_integrity

url, state_dir = sys.argv[1:]
store = Store(url)
ledger = Ledger(store, state_dir=state_dir)
ledger.start(interval=0.05)
Limits(store).set("tenant", "t", "in_flight", 10**6)

def one(number):
    reservation = Reservation(request_id=str(number), key_id="k", tenant="t", endpoint="e", entity="m", mode="p",
                              task="chat", input_tokens=1, max_output_tokens=100)
    with ledger.reserve(reservation) as lease:
        for _ in range(5):
            lease.count(1)
            gevent.sleep(0.001)
        if number % 10 == 0:
            gevent.sleep(60)  # killed below

beats = []
def beat():
    while True:
        beats.append(time.monotonic())
        gevent.sleep(0.005)

beating = gevent.spawn(beat)
stuck = [gevent.spawn(one, number) for number in range(200)]
gevent.joinall([g for i, g in enumerate(stuck) if i % 10], timeout=60)
gevent.killall([g for i, g in enumerate(stuck) if not i % 10])
if url.startswith("sqlite"):
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    before = len(beats)
    waiting = gevent.spawn(one, 201)
    gevent.sleep(0.5)
    during = len(beats) - before
    other.execute("ROLLBACK")
    waiting.join(10)
    assert during >= 5, during  # a locked database holds up the request that needs it, not the worker
beating.kill()
rows = list(Usage(store).rows(UsageFilter()))
assert len(rows) == 200 + url.startswith("sqlite"), len(rows)
assert all(row.completion_tokens == 5 for row in rows)
assert sorted({row.status for row in rows}) == ["aborted", "ok"]
assert sum(row.status == "aborted" for row in rows) == 20
check_integrity(store)
ledger.close()
print("fine")
"""


def test_greenlets_meter_and_are_killed(store_url, tmp_path):
    """In a monkey-patched worker: 200 greenlets at once, some killed; a locked database does not stop the others."""
    command = [sys.executable, "-c", SCRIPT, store_url, str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
