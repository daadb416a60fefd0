"""A host whose clock is wrong: refused by name, bounded by the store's clock, and what it has moved is repaired."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner
from ledger_rows import rows_of

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.interface.errors import LimitExceeded, PermissionDenied, Unavailable
from mlflow_llm.serving.metering import Ledger, Limits, Price, Store
from mlflow_llm.serving.metering.accounts.audit import Audit, AuditFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.accounts.monotonic_clock import since_boot
from mlflow_llm.serving.metering.accounts.prices import Prices
from mlflow_llm.serving.metering.ledger.store_clock import StoreClock
from mlflow_llm.serving.metering.ledger.window_repair import repair

DAYS = 40 * 86_400.0


class Host:
    """A host whose wall clock is ``ahead`` of the true time."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead

    def wall(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def opened(store, tmp_path):
    """Return a maker of ledgers of hosts; ``max_clock_skew`` is None for those of an earlier release."""
    made = []

    def make(host: Host, where: str = "state", max_clock_skew: float | None = 60.0) -> Ledger:
        made.append(
            Ledger(
                store,
                state_dir=tmp_path / where,
                clock=host.wall,
                monotonic=lambda: since_boot() + host.ahead,
                max_clock_skew=max_clock_skew,
            )
        )
        return made[-1]

    yield make
    for ledger in made:
        ledger.close()


@pytest.mark.parametrize("ahead", [DAYS, -DAYS])
def test_a_wrong_clock_is_refused_at_the_start(store, ahead):
    """A server does not start on a host whose clock is off, and says by how much, in which direction and the bound."""
    StoreClock(store, 60.0).check()
    way = "ahead of" if ahead > 0 else "behind"
    with pytest.raises(Unavailable, match=rf"the clock of this host is 345\d{{4}} s {way} .*max_clock_skew is 60 s"):
        StoreClock(store, 60.0, wall=Host(ahead).wall).check()
    StoreClock(store, 2 * DAYS, wall=Host(ahead).wall).check()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_clock_that_goes_wrong_admits_nothing_until_it_is_right(store, opened, host, reserve_of):
    """With the next round of upkeep a host whose clock was set wrong refuses, by name, and admits again once it is
    right; its windows have not moved.
    """
    Limits(store).set("tenant", "acme", "otpm", 30)
    ledger = opened(host)
    ledger.reserve(reserve_of("r1"))
    host.ahead = DAYS
    ledger.maintain()
    with pytest.raises(Unavailable, match=r"the clock of this host is .* ahead of that of the database") as refused:
        ledger.reserve(reserve_of("r2"))
    assert refused.value.retry_after == 30
    with pytest.raises(Unavailable, match="max_clock_skew"):
        ledger.check(key_id="key_1", tenant="acme", endpoint="chat", entities=None, generates=True)
    host.ahead = 0.0
    ledger.maintain()
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r3"))
    check_integrity(store)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_processes_of_one_host_share_the_time_of_the_first(store, opened, host, reserve_of, tmp_path):
    """On SQLite, a worker that starts while the wall clock is wrong charges the windows of the others, and none in the
    future.
    """
    Limits(store).set("tenant", "acme", "otpm", 30)
    opened(host).reserve(reserve_of("r1"))
    wrong = Ledger(store, state_dir=tmp_path / "state", clock=Host(DAYS).wall, max_clock_skew=60.0)
    with pytest.raises(LimitExceeded):
        wrong.reserve(reserve_of("r2"))
    wrong.close()


def test_a_host_that_was_started_again_knows_what_time_has_passed(sqlite_url):
    """After a restart of the host any later time is accepted, and none before the newest that the store has seen."""
    store = Store(sqlite_url)
    StoreClock(store, 60.0, boot=lambda: "first").check()
    with pytest.raises(Unavailable, match="behind"):
        StoreClock(store, 60.0, boot=lambda: "second", wall=Host(-3600.0).wall).check()
    StoreClock(store, 60.0, boot=lambda: "second", wall=Host(3600.0).wall).check()
    with pytest.raises(Unavailable, match="windows repair"):
        StoreClock(store, 60.0, boot=lambda: "second").check()
    store.close()


def moved_by(store, opened, reserve_of):
    """Let a server of an earlier release use a tenant's budget and windows with a clock that is 40 days ahead."""
    Prices(store, clock=lambda: 1.0).set("*", Price(input=0, output=1_000_000))
    for kind, value in (("otpm", 30), ("budget_month", 25)):
        Limits(store).set("tenant", "acme", kind, value)
    wrong = opened(Host(DAYS), "other-host", None)
    wrong.reserve(reserve_of("r1")).settle(completion=20)


def test_windows_in_the_future_are_refused_by_name_until_they_are_repaired(store, store_url, opened, host, reserve_of):
    """Limits that a wrong clock has moved admit nothing, neither too much nor after 40 days; the command repairs them,
    and what was used counts as used now.
    """
    moved_by(store, opened, reserve_of)
    ledger = opened(host)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"limits of tenant acme are 345.* s ahead .*windows repair"):
            ledger.reserve(reserve_of("r2", max_output_tokens=5))
    done = CliRunner().invoke(cli, ["windows", "repair", "--database", store_url])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("1 ledger rows and 0 provisioned minutes moved back by 345")
    check_integrity(store)
    ledger.maintain()
    assert abs(rows_of(store)["r1"].started_ms / 1000 - time.time()) < 3600
    ledger.reserve(reserve_of("r3", max_output_tokens=5))
    with pytest.raises((LimitExceeded, PermissionDenied)):
        ledger.reserve(reserve_of("r4", max_output_tokens=6))
    assert next(entry.action for entry in Audit(store).page(AuditFilter())[0]) == "windows.repair"


def test_a_known_shift_restores_the_true_times(store, opened, host, reserve_of):
    """With the seconds that the clock was ahead, rows get the times that they had, and windows follow."""
    moved_by(store, opened, reserve_of)
    done = repair(store, shift=int(DAYS))
    assert (done.rows, done.shift) == (1, int(DAYS))
    assert abs(rows_of(store)["r1"].started_ms / 1000 - time.time()) < 3600
    opened(host).reserve(reserve_of("r2", max_output_tokens=5))
    assert repair(store).rows == 0
    check_integrity(store)
