"""Wall clocks that are set: they label rows, and decide nothing that is a duration."""

from __future__ import annotations

import pytest
from ledger_rows import forget, rows_of

from mlflow_llm.serving.interface.errors import LimitExceeded
from mlflow_llm.serving.metering import Bucket, Ledger, Limits, Price
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.accounts.monotonic_clock import MonotonicClock
from mlflow_llm.serving.metering.accounts.prices import Prices
from mlflow_llm.serving.metering.store.staleness import StalenessDetector

HOURS = 7200.0


class Clocks:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self.monotonic, self.offset = 50.0, wall - 50.0

    def wait(self, seconds: float) -> None:
        self.monotonic += seconds

    def step(self, seconds: float) -> None:
        self.offset += seconds

    def wall(self) -> float:
        return self.monotonic + self.offset


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def ledgers(store, tmp_path):
    """Return a maker of ledgers of several processes on one host; all are closed at the end."""
    made = []

    def make(clocks: Clocks, where: str = "state") -> Ledger:
        made.append(Ledger(store, state_dir=tmp_path / where, clock=clocks.wall, monotonic=lambda: clocks.monotonic))
        return made[-1]

    yield make
    for ledger in made:
        ledger.close()


@pytest.mark.parametrize("step", [HOURS, -HOURS])
def test_a_row_ends_after_it_has_started(store, clocks, ledgers, reserve_of, step):
    """A row's duration is the elapsed time, even if the wall clock was set meanwhile."""
    ledger = ledgers(clocks)
    lease = ledger.reserve(reserve_of("r1"))
    clocks.wait(1.5)
    clocks.step(step)
    lease.settle(completion=1)
    row = rows_of(store)["r1"]
    assert row.ended_ms - row.started_ms == 1500


def test_a_recovered_row_ends_no_earlier_than_it_started(store, clocks, ledgers, reserve_of):
    """A recovered row does not end before it started, even if the wall clock was set back."""
    ledger = ledgers(clocks)
    ledger.reserve(reserve_of("r1"))
    forget(ledger, "r1")
    ledger.maintain()
    clocks.step(-HOURS)
    clocks.wait(31)
    ledger.maintain()
    row = rows_of(store)["r1"]
    assert (row.status, row.ended_ms) == ("recovered", row.started_ms)


def test_a_price_stays_in_force(store, clocks, ledgers, reserve_of):
    """A clock that is set back makes no request free, and lets none pass a budget."""
    Prices(store, clock=clocks.wall).set("*", Price(input=0, output=1_000_000))
    Limits(store).set("tenant", "acme", "budget_day", 50)
    ledger = ledgers(clocks)
    ledger.reserve(reserve_of("r1")).settle(completion=1)
    clocks.step(-HOURS)
    ledger.reserve(reserve_of("r2")).settle(completion=1)
    rows = rows_of(store)
    assert rows["r2"].cost == rows["r1"].cost > 0


@pytest.mark.parametrize("step", [HOURS, -HOURS])
def test_a_window_lasts_as_long_as_it_says(store, clocks, ledgers, reserve_of, step):
    """A clock that is set neither empties a window of 60 s nor keeps it full, for this process and for one that starts
    with the new time."""
    Limits(store).set("tenant", "acme", "otpm", 30)
    ledger = ledgers(clocks)
    ledger.reserve(reserve_of("r1"))
    clocks.step(step)
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r2"))
    assert refused.value.retry_after == 61
    clocks.wait(60)
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r3"))
    clocks.wait(1)
    ledger.reserve(reserve_of("r4"))
    later = ledgers(clocks)
    if step < 0:  # after a step forward one window is dropped once: the ledger's time goes on from there
        with pytest.raises(LimitExceeded):
            later.reserve(reserve_of("r5"))
    clocks.wait(61)
    later.reserve(reserve_of("r6"))
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r7"))
    check_integrity(store)


def test_a_reserve_refills_by_time_that_passes(store, clocks, ledgers, reserve_of):
    """A reserve refills by elapsed time, not by the wall clock, even after that was set back."""
    ledger = ledgers(clocks)
    bucket = Bucket(rate=1, burst_seconds=40, prompt_weight_milli=0)
    taken = []
    for number, (wait, step) in enumerate([(0, 0), (0, 0), (0, HOURS), (20, -2 * HOURS), (0, 0)]):
        clocks.step(step)
        clocks.wait(wait)
        taken.append(ledger.reserve(reserve_of(f"r{number}", bucket=bucket)).within_reserve)
    assert taken == [True, True, False, True, False]


def test_a_clock_step_does_not_declare_a_process_dead(store, clocks, ledgers, reserve_of):
    """The rows of a process of another host stay open while its heartbeats come, whatever the times say."""
    theirs = Clocks()
    here, there = ledgers(clocks), ledgers(theirs, "other-host")
    lease = there.reserve(reserve_of("r1"))
    there.maintain()
    for step in (HOURS, -2 * HOURS, HOURS):
        here.maintain()
        clocks.step(step)
        clocks.wait(59)
        theirs.wait(59)
        here.maintain()
        there.maintain()
    assert rows_of(store)["r1"].status == "open"
    lease.settle()


def test_a_steady_clock_moves_up_to_others_and_never_back():
    """The steady clock runs at the monotonic clock's pace from the latest time of the others, and never goes back."""
    clocks = Clocks(1000.0)
    steady = MonotonicClock(clocks.wall, lambda: clocks.monotonic)
    clocks.step(-500)
    assert steady.now() == 1000
    steady.move_up_to(900)
    assert steady.now() == 1000
    steady.move_up_to(1030)
    clocks.wait(5)
    assert steady.now() == 1035


def test_silence_is_measured_by_the_observers_clock():
    """Silence is timed by the observer's clock, and starts anew after an absence."""
    now = [0.0]
    detector = StalenessDetector(60, monotonic=lambda: now[0])
    assert detector.observe({"a": 1, "b": 1}) == []
    now[0] = 59
    assert detector.observe({"a": 1, "b": 2}) == []
    now[0] = 60
    assert detector.observe({"a": 1, "b": 2}) == ["a"]
    assert detector.observe({"b": 2}) == []
    now[0] = 119
    assert detector.observe({"a": 1, "b": 2}) == ["b"]
