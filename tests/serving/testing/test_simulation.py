"""The ledger under a simulator: schedules of faults from seeds, and defects that the simulator must find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from random import Random

import pytest

from mlflow_llm.serving.metering.ledger import admission, crash_recovery, settlement
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
        (admission, "admit", lambda *given, **named: None, r"request-\d+: \w+ of \w+ \w+: \d+ > \d+"),
        (crash_recovery, "read_progress", lambda path: [], r"\d+ came, and it is recovered"),
        (chain, "row_hash", lambda row: "0" * 64, "the chain: .*the row was altered"),
    ],
)
def test_a_defect_that_is_put_in_is_found(monkeypatch, module, name, stand, finding):
    """Settlements that credit no window, admissions without limits, recoveries without progress files, and links of
    other rows are found within two hundred schedules, by the invariant that they break."""
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


def test_the_command_counts_schedules():
    """The command runs the schedules that it is asked for on several processes, and says what it ran."""
    command = [sys.executable, "-m", "mlflow_llm.serving.testing.simulation", "--schedules", "4", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert re.search(r"^4 schedules from seed 0 in .* 0 schedules failed$", done.stdout, flags=re.M)
