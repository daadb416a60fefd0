from __future__ import annotations

import csv
import io

import pyarrow.parquet as pq
import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Limits, Price, ProvisionedMinutes, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.usage.export import csv_lines, write_parquet
from mlflow_llm.serving.metering.usage.plot import OTHERS, cost_over_time, plot_usage, tokens_by_kind, totals, unit_of


@pytest.fixture
def filled(ledger, reserve_of, clock):
    """Make six requests of two tenants and two models over two days, some in the same millisecond."""
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    for number in range(6):
        tenant, entity = ("acme", "=model") if number % 2 else ("zeta", "model-2")
        lease = ledger.reserve(reserve_of(f"r{number}", tenant=tenant, entity=entity, endpoint=f"e{number % 3}"))
        lease.settle(completion=number, finish_reason="stop")
        if number == 3:
            clock.now += 86_400
    return ledger


def ids(rows):
    return [row.request_id for row in rows]


def test_pages_follow_a_stable_cursor(store, filled, reserve_of, clock):
    """Rows added between two pages neither repeat nor hide others."""
    usage = Usage(store)
    first = usage.page(UsageFilter(), limit=4)
    clock.now += 1
    filled.reserve(reserve_of("new")).settle()
    second = usage.page(UsageFilter(), limit=4, cursor=first.next_cursor)
    assert ids(first.rows + second.rows) == ["r0", "r1", "r2", "r3", "r4", "r5", "new"]
    assert second.next_cursor is None


def test_rows_are_filtered(store, filled, clock):
    """Rows are filtered by time (end excluded), tenant, endpoint and entity."""
    usage, now = Usage(store), int(clock.now * 1000)
    assert ids(usage.rows(UsageFilter(start_ms=now))) == ["r4", "r5"]
    assert ids(usage.rows(UsageFilter(end_ms=now, tenant="acme"))) == ["r1", "r3"]
    assert ids(usage.rows(UsageFilter(endpoint="e0", entity="model-2"))) == ["r0"]


def test_bad_pages_are_refused(store):
    """Limits out of range and made-up cursors are the caller's mistake."""
    for arguments in ({"limit": 0}, {"limit": 10**6}, {"limit": True}, {"cursor": "x"}, {"cursor": "é"}):
        with pytest.raises(InvalidField):
            Usage(store).page(UsageFilter(), **arguments)
    with pytest.raises(InvalidField):
        Usage(store).sums(UsageFilter(), by=("weekday",))


def test_sums_by_day_and_tenant(store, filled):
    """Sums by day and tenant are exact and ordered."""
    sums = Usage(store).sums(UsageFilter(), by=("day", "tenant"))
    assert [(s.group, s.requests, s.prompt_tokens, s.completion_tokens, s.cost) for s in sums] == [
        (("2027-01-15", "acme"), 2, 20, 4, 28),
        (("2027-01-15", "zeta"), 2, 20, 2, 24),
        (("2027-01-16", "acme"), 1, 10, 5, 20),
        (("2027-01-16", "zeta"), 1, 10, 4, 18),
    ]


def test_csv_and_parquet_have_every_row(store, filled, tmp_path):
    """CSV and Parquet have the same rows, and texts that a spreadsheet would run are escaped in the CSV."""
    usage = Usage(store)
    rows = list(csv.DictReader(io.StringIO("".join(csv_lines(usage, UsageFilter())))))
    assert [row["request_id"] for row in rows] == [f"r{number}" for number in range(6)]
    assert rows[1]["entity"] == "'=model"
    path = str(tmp_path / "usage.parquet")
    assert write_parquet(usage, UsageFilter(), path) == 6
    table = pq.read_table(path)
    assert table["completion_tokens"].to_pylist() == list(range(6))
    assert str(table.schema.field("started_ms").type) == "timestamp[ms, tz=UTC]"


def test_a_plot_is_written(store, filled, tmp_path):
    """Stacks hold every token and micro-unit of the day, and an image comes out, with rows and without."""
    usage = Usage(store)
    days, kinds = tokens_by_kind(usage, UsageFilter())
    assert days == ["2027-01-15", "2027-01-16"]
    assert [sum(values) for values in zip(*kinds.values(), strict=True)] == [46, 29]
    assert kinds["completion"] == [6, 9]
    assert cost_over_time(usage, UsageFilter(), "tenant") == (days, {"acme": [28, 20], "zeta": [24, 18]})
    for name, what in (("a.png", UsageFilter()), ("b.svg", UsageFilter(tenant="nobody"))):
        plot_usage(Usage(store), what, str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000


def test_a_short_span_is_plotted_by_the_hour(store, ledger, reserve_of, clock, tmp_path):
    """Usage of few days has a bar an hour, and that of many a bar a day; both add up, and the totals are written."""
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    usage = Usage(store)
    assert totals(usage, UsageFilter()) == "no usage"
    for number in range(3):
        ledger.reserve(reserve_of(f"h{number}", adapter="pirate" if number else None)).settle(completion=number)
        clock.now += 3600
    assert unit_of(usage, UsageFilter()) == "hour"
    hours, stacks = cost_over_time(usage, UsageFilter(), "adapter", "hour")
    assert hours == ["2027-01-15T08:00Z", "2027-01-15T09:00Z", "2027-01-15T10:00Z"]
    assert {name: [value > 0 for value in values] for name, values in stacks.items()} == {
        "pirate": [False, True, True],
        "none": [True, False, False],
    }
    days, by_day = cost_over_time(usage, UsageFilter(), "adapter")
    assert days == ["2027-01-15"]
    assert {name: sum(values) for name, values in stacks.items()} == {name: by_day[name][0] for name in by_day}
    plot_usage(usage, UsageFilter(), str(tmp_path / "a.svg"), ("day", "endpoint", "adapter"))
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("tokens per hour", "cost by endpoint", "cost by adapter", "(UTC): 3 requests,"):
        assert f"<!-- {text}" in drawn or text in drawn
    clock.now += 4 * 86_400
    ledger.reserve(reserve_of("later")).settle(completion=1)
    assert unit_of(usage, UsageFilter()) == "day"


def test_a_provisioned_minute_is_billed_once_by_its_most_units(store, ledger, clock):
    """Any number of workers may record a minute; it counts in the tenant's budget."""
    minutes = ProvisionedMinutes(store, clock=clock)
    ledger.prices.set("model-1", Price(unit_minute=7))
    Limits(store).set("tenant", "acme", "budget", 10**6)
    here = {"tenant": "acme", "endpoint": "chat", "entity": "model-1"}
    assert [minutes.record(**here, units=units) for units in (10, 10, 8, 12)] == [70, 0, 0, 14]
    clock.now += 60
    assert minutes.record(**here, units=10) == 70
    assert Usage(store).provisioned_cost(UsageFilter()) == (("acme", "chat", "model-1", 22, 154),)
    check_integrity(store)


def test_a_provisioned_minute_has_the_price_of_what_was_asked_for(store, ledger, clock):
    """Also after an upgrade in the middle of a minute, which an earlier release has billed by that name."""
    minutes = ProvisionedMinutes(store, clock=clock)
    ledger.prices.set("/srv/models/m", Price(unit_minute=7))
    ledger.prices.set("chat", Price(unit_minute=3))
    here = {"tenant": "acme", "endpoint": "chat"}
    assert minutes.record(**here, entity="/srv/models/m", units=10) == 70
    now = {"entity": "m", "asked": "/srv/models/m"}
    assert minutes.record(**here, **now, units=10) == 0
    clock.now += 60
    assert [minutes.record(**here, **now, units=units) for units in (10, 12)] == [70, 14]
    assert minutes.record(**here, entity="other", units=1) == 3
    check_integrity(store)


def test_provisioned_minutes_spend_the_budget(store, ledger, clock, reserve_of):
    """A window that is there already takes a minute's money, too."""
    ledger.prices.set("*", Price(input=1_000_000, unit_minute=1))
    Limits(store).set("tenant", "acme", "budget", 100)
    ledger.reserve(reserve_of("r1")).settle()
    ProvisionedMinutes(store, clock=clock).record(tenant="acme", endpoint="chat", entity="model-1", units=75)
    lease = ledger.reserve(reserve_of("r2"))
    assert lease.limits[0].remaining == 100 - 10 - 75 - 10
    lease.settle()
    check_integrity(store)


def test_a_plot_has_colours_for_the_largest(store, ledger, reserve_of):
    """The most expensive tenants have bars of their own, the others share one, and the sum is unchanged."""
    ledger.prices.set("*", Price(input=1_000_000))
    for number in range(14):
        ledger.reserve(reserve_of(f"r{number}", tenant=f"t{number:02}")).settle()
    _, stacks = cost_over_time(Usage(store), UsageFilter(), "tenant")
    assert list(stacks) == [*(f"t{number:02}" for number in range(9)), OTHERS]
    assert sum(map(sum, stacks.values())) == sum(total.cost for total in Usage(store).sums(UsageFilter(), ("day",)))
