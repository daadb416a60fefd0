"""The plan's files: what workers write there is read without changing it, and goes with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_llm.serving.control.plan import Plan, PlanDirectory, WorkerState

KILLED_WORKER = """
import os, signal, sys
from mlflow_llm.serving.control.plan import PlanDirectory
PlanDirectory(sys.argv[1]).add_worker()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def plan(tmp_path: Path) -> PlanDirectory:
    return PlanDirectory(tmp_path)


def files(place: Path) -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names}


def test_a_plan_is_adopted_when_every_worker_has_it(plan: PlanDirectory) -> None:
    """A plan counts as adopted once every worker has it; a new worker has adopted none, and without workers all are
    adopted.
    """
    plan.publish(Plan(generation=3))
    assert plan.read().generation == 3
    assert plan.is_adopted(3)
    one, other = plan.add_worker(), plan.add_worker()
    one.write(WorkerState(generation=4, addresses=("a",)))
    assert not plan.is_adopted(3)
    other.write(WorkerState(generation=3, addresses=("b",)))
    assert plan.is_adopted(3)
    assert [plan.in_use(address) for address in "abc"] == [True, True, False]
    one.remove()
    assert (plan.is_adopted(4), plan.in_use("a")) == (False, False)
    other.remove()


def test_looking_at_a_directory_changes_nothing_there(plan: PlanDirectory, tmp_path: Path) -> None:
    """Reading a plan directory changes nothing in it; a killed worker's files are ignored, and removed by the next
    worker.
    """
    assert (plan.read(), plan.workers(), plan.replica_requested_at("engine")) == (Plan(), (), None)
    assert list(tmp_path.iterdir()) == []
    subprocess.run([sys.executable, "-c", KILLED_WORKER, str(tmp_path)], check=False)
    left = files(tmp_path)
    assert len(left) == 2
    assert (plan.workers(), plan.is_adopted(1), plan.in_use("a")) == ((), True, False)
    assert files(tmp_path) == left
    worker = plan.add_worker()
    assert not left & files(tmp_path)
    assert plan.workers() == (WorkerState(),)
    worker.remove()
    assert files(tmp_path) == set()


def test_a_requested_replica_has_its_time(plan: PlanDirectory) -> None:
    """A request for a replica is recorded for each engine with a monotonic time."""
    plan.request_replica("engine")
    first = plan.replica_requested_at("engine")
    plan.request_replica("engine")
    second = plan.replica_requested_at("engine")
    assert first is not None
    assert second is not None
    assert first <= second
    assert plan.replica_requested_at("other") is None


def test_changes_are_noted(plan: PlanDirectory, tmp_path: Path) -> None:
    """Changes of the endpoint store and requests without a replica are noticed at once without polling; after the
    server's end they are ignored.
    """
    before = plan.change_stamp()
    assert plan.change_stamp() == before
    plan.note_change()
    noted = plan.change_stamp()
    assert noted != before
    os.utime(tmp_path / "changed", ns=(1, 1))  # files' times are coarse
    noted = plan.change_stamp()
    plan.request_replica("engine")
    assert plan.change_stamp() != noted
    PlanDirectory(tmp_path / "gone").note_change()
