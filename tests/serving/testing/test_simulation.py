"""The ledger under a simulator: schedules of faults from seeds, and defects that the simulator must find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from mlflow_llm.serving.metering.accounts import windows
from mlflow_llm.serving.metering.ledger import admission, crash_recovery, fenced, settlement, slices
from mlflow_llm.serving.metering.proof import chain
from mlflow_llm.serving.metering.store.group_commit import GroupCommit
from mlflow_llm.serving.testing.simulation.hosts import Host, Process
from mlflow_llm.serving.testing.simulation.machine import Machine, simulated
from mlflow_llm.serving.testing.simulation.run import outcomes
from mlflow_llm.serving.testing.simulation.scheduler import Scheduler

SCHEDULES = int(os.environ.get("MLFLOW_LLM_SIMULATED_SCHEDULES", "200"))
FOUND = {
    3: "a process that began on a full disk raised OSError",
    6: "a journal whose lock had no room on the disk stopped the rest of the upkeep",
    23: "a row settled by a process that ended soon after had fewer tokens generated than billed",
    143: "a lease that was settled while its process ended raised IndexError",
    157: "a settlement that was kept in memory was lost when its process ended in order",
    226: "the same as 23, after a loss of power",
    467: "a settlement that was under way when its process ended in order was lost",
    850: "the same as 467",
    102: "a row of a process whose clock was wrong, and which ended soon after, had fewer tokens generated than billed",
}
"""Seeds of schedules that found a defect; ``tests/serving/metering/ledger/test_ledger_disk.py`` has each by itself."""


def failures(seeds) -> list[str]:
    return [f"seed {found.seed}: {found.failure}" for found in outcomes(seeds) if found.failure]


def test_no_schedule_breaks_an_invariant():
    """Whatever fails, windows equal rows, each request ends once, received ≤ billed ≤ generated, and no limit is
    exceeded."""
    found = failures(range(SCHEDULES))
    assert not found, "\n".join(found)


def test_no_schedule_that_found_a_defect_fails_again():
    """The seeds that found defects find none now."""
    found = failures(FOUND)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "name", "stand", "finding"),
    [
        (settlement, "save_windows", lambda connection, states: None, "the window says"),
        (admission, "admit", lambda *given, **named: (), r"request-\d+: \w+ of \w+ \w+: \d+ > \d+"),
        (crash_recovery, "read_progress", lambda path: [], r"\d+ came, and it is recovered"),
        (chain, "row_hash", lambda row: "0" * 64, "the chain: .*the row was altered"),
        (windows, "lent", lambda state, kind: 0, r"\d+, 0 are lent"),
        (slices.Slice, "has_room", lambda self, wanted: True, r"the rows \d+, \d+ are lent|: \d+ > \d+"),
    ],
)
def test_a_defect_that_is_put_in_is_found(monkeypatch, module, name, stand, finding):
    """Settlements that credit no window, admissions without limits, recoveries without progress files, links of other
    rows, and slices that count as nothing or are drawn from without end are found within two hundred schedules, by the
    invariant that they break."""
    monkeypatch.setattr(module, name, stand)
    found = next((one.failure for one in outcomes(range(200)) if one.failure), "")
    assert re.search(finding, found)


def test_an_actor_waits_for_the_group_before_its_own(tmp_path):
    """An actor whose item goes into the next group waits at a seam, instead of stopping the thread of all actors."""
    scheduler = Scheduler(Random(0), 0.0)
    host = Host("host", tmp_path, scheduler)
    done: list[tuple[int, ...]] = []

    def run(items):
        scheduler.sleep(1.0)
        done.append(tuple(items))
        return items

    with simulated(Machine(scheduler)):
        group = GroupCommit(run)
        actors = [
            scheduler.spawn(f"actor {item}", Process(f"gateway{item}", host, item), lambda item=item: group("", item))
            for item in range(3)
        ]
        while scheduler.step():
            pass
    assert [actor.result for actor in actors] == [0, 1, 2]
    assert sorted(sum(done, ())) == [0, 1, 2]
    assert len(done) == 2


def test_a_seed_is_one_schedule():
    """The command shows each step of a seed's schedule: the same ones in each process, whatever its hashes are."""
    command = [sys.executable, "-m", "mlflow_llm.serving.testing.simulation", "--seed", "7"]
    shown = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        for hashes in ("1", "2")
    ]
    assert shown[0] == shown[1]
    assert re.search(r"\nseed 7: \d+ steps, nothing was broken\n$", shown[0])


def test_a_schedule_does_not_depend_on_those_before_it():
    """A seed gives the same steps whether it is the first schedule of a process or a later one."""
    found = [(one.seed, one.steps, one.events) for one in outcomes([105, 7, 105])]
    assert found[0] == found[2] != found[1]


def test_schedules_draw_from_slices(monkeypatch):
    """Requests of some schedules are admitted from slices of limits, and settled to them."""
    found = Counter()
    insert, close_rows = fenced.insert, fenced.close_rows

    def inserting(connection, drawn):
        written = insert(connection, drawn=drawn)
        found["admitted"] += len(drawn) if written else 0
        return written

    def closing(connection, closings, drawn):
        closed = close_rows(connection, closings=closings, drawn=drawn)
        found["settled"] += len(closed)
        return closed

    monkeypatch.setattr(fenced, "insert", inserting)
    monkeypatch.setattr(fenced, "close_rows", closing)
    assert not failures(range(100, 130))
    assert found["admitted"] > 10
    assert found["settled"] > 0


def test_the_command_counts_schedules():
    """The command runs the schedules that it is asked for on several processes, and says what it ran."""
    command = [sys.executable, "-m", "mlflow_llm.serving.testing.simulation", "--schedules", "4", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert re.search(r"^4 schedules from seed 0 in .* 0 schedules failed$", done.stdout, flags=re.M)
