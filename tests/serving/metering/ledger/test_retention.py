from __future__ import annotations

import pytest

from mlflow_llm.serving.interface.errors import InvalidField, PermissionDenied
from mlflow_llm.serving.metering import Limits, Price, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.ledger import retention
from mlflow_llm.serving.metering.ledger.retention import fold

DAY = 86_400


@pytest.fixture
def aged(ledger, reserve_of, clock):
    """Make requests of three days: two 40 and 39 days ago (one still open), and one of today."""
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    open_lease = None
    for age in (40, 39, 0):
        for number in range(5):
            lease = ledger.reserve(reserve_of(f"{age}-{number}", tenant=f"t{number % 2}", key_id=f"k{number}"))
            if (age, number) == (39, 4):
                open_lease = lease
            else:
                lease.settle(completion=number, finish_reason="stop", drafts=(2 * number, number))
        clock.now += DAY * (1 if age == 40 else 39)
    clock.now -= DAY * 39
    yield ledger
    open_lease.settle()


def test_folding_keeps_every_total(store, aged, clock, monkeypatch):
    """Folding old closed rows into daily sums keeps every total by any column and filter."""
    monkeypatch.setattr(retention, "BATCH_ROWS", 3)
    usage, today = Usage(store), int(clock.now * 1000)
    questions = [
        (UsageFilter(), ("day", "tenant", "entity")),
        (UsageFilter(tenant="t1"), ("key_id",)),
        (UsageFilter(start_ms=(today // (DAY * 1000) - 39) * DAY * 1000), ("day",)),
        (UsageFilter(endpoint="chat", entity="model-1", status="ok"), ("endpoint", "tenant")),
    ]
    before = [usage.sums(*question) for question in questions]
    assert (before[0][0].draft_tokens, before[0][0].accepted_draft_tokens) == (12, 6)
    assert fold(store, 32, clock=clock) == 9
    assert fold(store, 32, clock=clock) == 0
    assert [usage.sums(*question) for question in questions] == before
    assert sorted(row.request_id for row in usage.rows(UsageFilter())) == [*(f"0-{n}" for n in range(5)), "39-4"]


def test_folded_money_counts_in_budgets(store, aged, clock, reserve_of):
    """A budget that holds for ever counts folded days, with the window there already or built anew."""
    limits, spent = Limits(store), sum(total.cost for total in Usage(store).sums(UsageFilter(tenant="t0")))
    limits.set("tenant", "t0", "budget", spent + 100)
    aged.reserve(reserve_of("one", tenant="t0")).settle(prompt=0, completion=0)
    assert fold(store, 32, clock=clock) == 9
    check_integrity(store)
    limits.remove("tenant", "t0", "budget")
    limits.set("tenant", "t0", "budget", spent + 100)
    with pytest.raises(
        PermissionDenied, match=r"; 0\.00005 are left and"
    ):  # the open row of t0 holds 50, this one wants 60
        aged.reserve(reserve_of("two", tenant="t0", max_output_tokens=25))
    check_integrity(store)


@pytest.mark.parametrize("days", [31, 0, -1, True])
def test_recent_rows_are_kept(store, days):
    """Recent rows are not folded, since monthly budgets need them."""
    with pytest.raises(InvalidField, match="days"):
        fold(store, days)
