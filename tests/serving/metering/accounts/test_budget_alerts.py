"""Alerts of budgets: each share is told of once in each period, whoever leads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.accounts import windows
from mlflow_llm.serving.metering.accounts.budget_alerts import LOOK_SECONDS, BudgetAlerts
from mlflow_llm.serving.metering.accounts.limits import Bound, Limits
from mlflow_llm.serving.metering.accounts.windows import Amounts, WindowState
from mlflow_llm.serving.metering.store.outbox import EventOutbox
from mlflow_llm.serving.metering.store.tables import webhook_deliveries
from mlflow_llm.serving.metering.store.tables import windows as window_table

DAY = 86_400


class Place:
    """A store with budgets, and the alerts of a leader, under one clock."""

    def __init__(self, url: str) -> None:
        self.now = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
        self.store = Store(url)
        self.outbox = EventOutbox(self.store, ("http://a",), clock=lambda: self.now)
        self.states: dict[tuple[str, str], WindowState] = {}
        self.alerts = self.new_alerts()

    def new_alerts(self) -> BudgetAlerts:
        clock = {"clock": lambda: self.now, "monotonic": lambda: self.now}
        return BudgetAlerts(self.store, self.outbox, (0.8, 0.5, 1.0), **clock)  # type: ignore[arg-type]

    def spend(self, scope: str, subject: str, money: int, queries: int = 0) -> None:
        """Charge a window as an admission does, and let the leader look."""
        state = self.states.setdefault((scope, subject), WindowState())
        windows.charge(state, int(self.now), Amounts(money=money, queries=queries))
        values = {"state": windows.encode(state)}
        new = self.store.insert(window_table).values(scope=scope, subject=subject, **values)
        kept = new.on_conflict_do_update(index_elements=["scope", "subject"], set_=values)
        self.store.write(lambda connection: connection.execute(kept))
        self.look()

    def look(self, leads: bool = True) -> None:
        self.now += LOOK_SECONDS
        self.alerts.tick(leads)

    def told(self) -> list[dict[str, Any]]:
        """Return the data of the events so far, the oldest first."""
        query = sa.select(webhook_deliveries).order_by(webhook_deliveries.c.at_ms)
        rows = self.store.read(lambda connection: connection.execute(query).all())
        assert {row.type for row in rows} <= {"budget.alert"}
        found = [json.loads(row.body)["data"] for row in rows]
        return sorted(found, key=lambda data: (data["used"], data["share"]))


@pytest.fixture
def place(store_url: str) -> Iterator[Place]:
    made = Place(store_url)
    yield made
    made.store.close()


def test_each_share_is_told_of_once_a_period(place: Place) -> None:
    """A share that is used again the next day is told of again, and never twice a day, whoever leads."""
    Limits(place.store).set("tenant", "team", "budget_day", 10_000_000)
    place.spend("tenant", "team", 4_999_999)
    assert place.told() == []
    place.spend("tenant", "team", 1)
    (first,) = place.told()
    assert (float(first.pop("used")), float(first.pop("budget"))) == (5.0, 10.0)
    named = {"scope": "tenant", "subject": "team", "kind": "budget_day", "currency": "", "share": 0.5}
    assert first == named | {"soft": False}
    place.alerts = place.new_alerts()
    place.spend("tenant", "team", 5_000_000)
    place.look()
    assert sorted(one["share"] for one in place.told()) == [0.5, 0.8, 1.0]
    place.now += DAY
    place.look()
    assert len(place.told()) == 3
    place.spend("tenant", "team", 6_000_000)
    assert len(place.told()) == 4


def test_a_budget_that_is_raised_is_told_of_anew(place: Place) -> None:
    """Half of the new budget is another amount than half of the old one; a credit does not repeat an alert."""
    limits = Limits(place.store)
    limits.set("key", "k1", "budget", 1000)
    place.spend("key", "k1", 500)
    place.spend("key", "k1", -100)
    place.spend("key", "k1", 100)
    assert len(place.told()) == 1
    limits.set("key", "k1", "budget", 2000)
    place.spend("key", "k1", 499)
    assert len(place.told()) == 1
    place.spend("key", "k1", 1)
    assert len(place.told()) == 2


def test_a_users_budget_is_that_of_each_key(place: Place) -> None:
    """The event names the key; limits that are no budgets, and other subjects, are not told of."""
    limits = Limits(place.store)
    limits.set("user", "chat", "budget_month", 1000)
    limits.set("endpoint", "chat", "qpm", 1)
    place.spend("user", "chat\nk1", 600)
    place.spend("user", "chat\nk2", 400)
    place.spend("user", "other\nk1", 1000)
    place.spend("endpoint", "chat", 1000)
    (told,) = place.told()
    assert (told["scope"], told["subject"], told["key_id"], told["share"]) == ("user", "chat", "k1", 0.5)


def test_a_limits_own_shares_replace_those_of_the_server(place: Place) -> None:
    """A limit with shares is told of at these alone, at none if the list is empty; a soft one also when it is used."""
    limits = Limits(place.store)
    limits.set("tenant", "team", "budget", Bound(value=100, alert_at=(0.9,)))
    limits.set("tenant", "quiet", "budget", Bound(value=100, alert_at=()))
    limits.set("tenant", "soft", "budget", Bound(value=100, alert_at=(0.9,), soft=True))
    for tenant in ("team", "quiet", "soft"):
        place.spend("tenant", tenant, 150)
    found = {(one["subject"], one["share"], one["soft"]) for one in place.told()}
    assert found == {("team", 0.9, False), ("soft", 0.9, True), ("soft", 1.0, True)}


def test_a_rate_is_told_of_once_a_window(place: Place) -> None:
    """The same queries are told of once, although the minute of the clock ends between two looks; later ones again."""
    Limits(place.store).set("key", "k1", "qpm", Bound(value=2, soft=True))
    place.now += 30
    place.spend("key", "k1", 0, queries=2)
    place.look()
    (told,) = place.told()
    assert (told["kind"], told["used"], told["limit"], told["soft"]) == ("qpm", 2, 2, True)
    place.now += 120
    place.spend("key", "k1", 0, queries=2)
    assert len(place.told()) == 2


def test_end_users_are_told_of_by_name(place: Place) -> None:
    """Each end user's window is told of at the shares of the rule, unless an own limit replaces it."""
    limits = Limits(place.store)
    limits.set("tenant_user", "team", "budget_day", Bound(value=10, alert_at=(1.0,)))
    limits.set("tenant_user", "team", "budget_day", 10, end_user="bo")
    limits.set("endpoint_user", "chat", "budget_day", Bound(value=10, alert_at=(1.0,)))
    place.spend("tenant_user", "team\nada", 10)
    place.spend("tenant_user", "team\nbo", 10)
    place.spend("endpoint_user", "chat\nteam\nada", 10)
    found = {(one["subject"], one.get("tenant"), one["end_user"]) for one in place.told()}
    assert found == {("team", None, "ada"), ("chat", "team", "ada")}


def test_only_the_leader_tells(place: Place) -> None:
    """Another gateway looks at nothing."""
    Limits(place.store).set("tenant", "team", "budget", 10)
    place.spend("tenant", "team", 4)
    place.states["tenant", "team"] = WindowState()
    place.alerts = place.new_alerts()
    place.look(leads=False)
    assert place.told() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"budget_alert_at": "0.5"},
        {"budget_alert_at": "half"},
        {"budget_alert_at": "0"},
        {"budget_alert_at": "nan"},
        {"budget_alert_at": ",".join(["0.5"] * 11)},
    ],
)
def test_shares_that_make_no_sense_are_refused(settings: dict[str, str]) -> None:
    """So are shares without a webhook that could be told."""
    with pytest.raises(InvalidField) as refused:
        ServerSettings(**settings)  # type: ignore[arg-type]
    assert refused.value.param == "budget_alert_at"
