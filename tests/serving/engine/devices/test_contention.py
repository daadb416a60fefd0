"""CPU contention of the engine: the readings, when an episode begins and ends, and its log lines."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from mlflow_llm.serving.engine.devices import cpu_contention as module
from mlflow_llm.serving.engine.devices.cpu_contention import Contention, Readings, read


class Machine:
    """A clock and the readings at its time; ``passes`` advances it by a second with the given run and wait times."""

    def __init__(self) -> None:
        self.now, self.said = 100.0, Readings()
        self.changes: list[bool] = []
        self.contention = Contention(self.changes.append, readings=lambda: self.said, clock=lambda: self.now)

    def passes(self, seconds: int = 1, *, ran: float = 0.9, waited: float = 0.0, **more: float) -> float:
        for _ in range(seconds):
            self.now += 1.0
            added = {"ran": ran, "waited": waited, "total": 2.0, **more}
            self.said = Readings(**{k: getattr(self.said, k) + added.get(k, 0.0) for k in Readings.__slots__})
            self.contention.look()
        return self.contention.waiting


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_an_episode_of_contention_logs_two_lines(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """An episode begins after a window of waiting, lasts through pauses, and ends after ten calm seconds in which the
    engine ran."""
    caplog.set_level(logging.INFO, logger=module.__name__)
    assert machine.passes(5) == 0.0
    assert machine.passes(60, ran=0.5, waited=0.4) == pytest.approx(4 / 9)
    machine.passes(9)
    machine.passes(1, ran=0.8, waited=0.1)  # not calm yet
    machine.passes(30, ran=0.0)  # idle: that says nothing
    assert machine.changes == [True]
    machine.passes(10)
    assert machine.changes == [True, False]
    first, second = caplog.messages
    assert first.startswith("CPUs are oversubscribed: 44 % of the time was spent waiting for one (others run on")
    assert second == "CPUs are free again after 109 seconds"


def test_a_little_waiting_starts_no_episode(machine: Machine) -> None:
    """Waiting for less than a fifth, or by a thread that hardly ran, is shown but not reported."""
    assert machine.passes(20, ran=0.85, waited=0.15) == pytest.approx(0.15)
    assert machine.passes(20, ran=0.01, waited=0.02) == 0.0
    assert machine.changes == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"throttled": 0.5}, "the control group's quota of 0.5 CPUs is used up"),
        ({"stolen": 0.8}, "the host gives them to other machines"),
    ],
)
def test_the_cause_of_contention_is_named(
    more: dict[str, float],
    text: str,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU quota and the host's steal time are named apart from neighbouring processes."""
    monkeypatch.setattr(module, "quota", lambda: 0.5)
    machine.passes(waited=0.01, **more)
    assert text in caplog.text


def test_readings_within_a_window_or_by_other_threads_are_ignored(machine: Machine) -> None:
    """Readings are taken once a window, and only by the observed thread."""
    machine.said = Readings(ran=0.5, waited=0.5)
    machine.now += 0.9
    machine.contention.look()
    assert not machine.changes
    machine.now += 1.0
    other = threading.Thread(target=machine.contention.look)
    other.start()
    other.join()
    assert not machine.changes
    machine.contention.look()
    assert machine.changes == [True]


def test_readings_of_proc_and_cgroups(tmp_path: Path) -> None:
    """Readings are schedstat in nanoseconds, steal in ticks, and the worst throttling of the groups, of either cgroup
    version."""
    top = tmp_path / "cg"
    own = tmp_path / "proc/self"
    for directory in (own, tmp_path / "proc/thread-self", top / "a"):
        directory.mkdir(parents=True)
    (own / "cgroup").write_text("0::/a\n")
    (own / "mountinfo").write_text(f"30 23 0:26 / {top} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc/thread-self/schedstat").write_text("2500000000 1500000000 77\n")
    (tmp_path / "proc/stat").write_text("cpu  100 0 100 600 0 0 0 200 0 0\ncpu0 1 2 3\n")
    (top / "a/cpu.stat").write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 250000\n")
    (top / "cpu.stat").write_text("nr_periods 1\nnr_throttled 1\nthrottled_time 750000000\n")
    assert read(tmp_path / "proc") == Readings(ran=2.5, waited=1.5, throttled=0.75, stolen=2.0, total=10.0)


def test_readings_where_proc_and_cgroups_have_nothing(tmp_path: Path) -> None:
    """Without these files readings are unknown and nothing is raised."""
    assert read(tmp_path) == Readings()


def test_readings_of_this_machine() -> None:
    """Readings of the running machine never decrease."""
    first, second = read(), read()
    assert all(getattr(first, name) <= getattr(second, name) for name in Readings.__slots__)
