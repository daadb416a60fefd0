"""Turns of callers: one of them never holds all places of a pool."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mlflow_llm.serving.sandbox import NoProcess
from mlflow_llm.serving.sandbox.pool import Turns


def test_a_caller_has_one_place_at_a_time() -> None:
    """A second piece of work of the same caller waits for the first; another caller's, and nobody's, do not."""
    turns = Turns()
    past = time.monotonic()
    with turns.hold("a", past):
        with pytest.raises(NoProcess), turns.hold("a", past):
            pass
        with turns.hold("b", past), turns.hold("", past), turns.hold("", past):
            assert sorted(turns.places) == ["a", "b"]
    with turns.hold("a", past):
        pass
    assert turns.places == {}


THREADS_OF_A_WORKER = """
from gevent import monkey
monkey.patch_all()
import time
import gevent
from mlflow_llm.serving.frontend import gevent_wait
from mlflow_llm.serving.sandbox.pool import Turns

gevent_wait.install()  # as a worker does
turns, over = Turns(), []

def take(name):
    for _ in range(2000):
        with turns.hold(name, time.monotonic() + 60):
            pass
    over.append(name)

for name in ("a", "b", "c"):
    monkey.get_original("_thread", "start_new_thread")(take, (name,))
while len(over) < 3:
    gevent.sleep(0.01)
print(sorted(over), turns.places)
"""


def test_threads_of_a_patched_worker_do_not_hang() -> None:
    """Threads whose process gevent has patched take turns of several callers at once, and all end."""
    ran = subprocess.run([sys.executable, "-c", THREADS_OF_A_WORKER], capture_output=True, text=True, timeout=120)
    assert (ran.stdout.strip(), ran.returncode) == ("['a', 'b', 'c'] {}", 0), ran.stderr
