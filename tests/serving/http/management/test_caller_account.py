"""``GET /api/2.0/account`` and ``GET /api/2.0/requests`` over a real ledger, without a server around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Price, Reservation, Store
from mlflow_llm.serving.metering.accounts.limits import Bound, Limits

ACCOUNT, REQUESTS = "/api/2.0/account", "/api/2.0/requests"


@pytest.fixture
def books(tmp_path: Path) -> Iterator[tuple[Ledger, dict[str, str], dict[str, str]]]:
    """Yield a ledger with keys of two tenants, their secrets and their ids."""
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    ledger, keys = Ledger(store, state_dir=tmp_path), Keys(store)
    made = {
        "worker": keys.create("acme", name="w"),
        "reader": keys.create("acme", scopes=("usage",)),
        "stranger": keys.create("zeta"),
        "operator": keys.create("ops", scopes=("manage",)),
    }
    yield (
        ledger,
        {who: secret for who, (secret, _) in made.items()},
        {who: key.key_id for who, (_, key) in made.items()},
    )
    ledger.close()
    store.close()


Get = Callable[..., Any]


@pytest.fixture
def get(make: Callable[..., WorkerState], books: tuple[Ledger, dict[str, str], dict[str, str]]) -> Get:
    client = create_app(make(keys=Keys(books[0].store), ledger=books[0])).test_client()

    def ask(who: str, path: str, **query: object) -> Any:
        return client.get(path, query_string=query, headers={"Authorization": f"Bearer {books[1][who]}"})

    return ask


def used(ledger: Ledger, number: int, key_id: str, tenant: str, adapter: str | None = None, **more: Any) -> None:
    reservation = Reservation(
        request_id=f"r{number}",
        key_id=key_id,
        tenant=tenant,
        endpoint="assistant",
        entity="model-1",
        adapter=adapter,
        mode="pay_per_token",
        task="chat",
        input_tokens=10,
        max_output_tokens=20,
        **more,
    )
    ledger.reserve(reservation).settle(completion=number, finish_reason="stop")


def test_an_account_shows_what_is_left_of_each_limit(
    get: Get, books: tuple[Ledger, dict[str, str], dict[str, str]]
) -> None:
    """Limits of the key, its tenant and each user of an endpoint, with what the ledger counts against them; one on a
    shared endpoint is not shown, since it would tell the usage of others."""
    ledger, _, ids = books
    limits = Limits(ledger.store)
    limits.set("key", ids["worker"], "otpm", 100)
    limits.set("tenant", "acme", "budget_month", 5_000_000)
    limits.set("user", "assistant", "qpm", 7)
    limits.set("endpoint", "assistant", "qph", 1000)
    limits.set("tenant", "zeta", "qpm", 3)
    ledger.prices.set("model-1", Price(output=1_000_000))
    used(ledger, 4, ids["worker"], "acme")
    found = {(one["scope"], one["kind"]): one for one in get("worker", ACCOUNT).json["limits"]}
    assert set(found) == {("key", "otpm"), ("tenant", "budget_month"), ("user", "qpm")}
    assert found["key", "otpm"] | {"reset_seconds": 0} == {
        "scope": "key",
        "endpoint": None,
        "end_user": None,
        "kind": "otpm",
        "unit": "output tokens a minute",
        "soft": False,
        "alert_at": [],
        "allowed": 100,
        "used": 4,
        "remaining": 96,
        "reset_seconds": 0,
    }
    assert 0 < found["key", "otpm"]["reset_seconds"] <= 61
    assert (found["tenant", "budget_month"]["remaining"], found["user", "qpm"]["remaining"]) == ("4.999996", 6)
    assert found["user", "qpm"]["endpoint"] == "assistant"
    (other,) = (one for one in get("stranger", ACCOUNT).json["limits"] if one["scope"] == "tenant")
    assert (other["remaining"], other["reset_seconds"]) == (3, 0)  # nothing is used of it


def test_an_account_shows_soft_limits_and_their_alerts(
    make: Callable[..., WorkerState], books: tuple[Ledger, dict[str, str], dict[str, str]]
) -> None:
    """A soft limit may be exceeded, and all limits say at which shares webhooks are told: their own, the server's for
    budgets, and all of it for soft ones; on a server without webhooks nobody is told."""
    ledger, secrets, ids = books
    limits = Limits(ledger.store)
    limits.set("key", ids["worker"], "otpm", Bound(value=3, soft=True, alert_at=(0.5,)))
    limits.set("key", ids["worker"], "qpm", 5)
    limits.set("key", ids["worker"], "budget_day", 9)
    limits.set("tenant", "acme", "budget_month", Bound(value=9, alert_at=()))
    used(ledger, 4, ids["worker"], "acme")
    for webhooks, shares in (("", [[], [], [], []]), ("http://localhost/told", [[0.5, 1.0], [], [0.2, 0.8], []])):
        told = (
            {"webhook_secret_file": "secret", "budget_alert_at": "0.8,0.2", "database": "sqlite://"} if webhooks else {}
        )
        told["webhook_urls"] = webhooks
        client = create_app(make(keys=Keys(ledger.store), ledger=ledger, **told)).test_client()
        answer = client.get(ACCOUNT, headers={"Authorization": f"Bearer {secrets['worker']}"})
        found = {one["kind"]: one for one in answer.json["limits"]}
        assert [found[kind]["alert_at"] for kind in ("otpm", "qpm", "budget_day", "budget_month")] == shares
        assert [found["otpm"][name] for name in ("soft", "allowed", "used", "remaining")] == [True, 3, 4, 0]


def test_an_account_shows_own_keys_and_prices(get: Get, books: tuple[Ledger, dict[str, str], dict[str, str]]) -> None:
    """A key sees itself, with the scope "usage" its tenant's keys, and the prices of what it may see; no secret."""
    ledger, secrets, ids = books
    ledger.prices.set("assistant", Price(input=2_000_000, cached=1_000_000, output=3_000_000))  # by its endpoint
    found = get("worker", ACCOUNT).json
    assert [key["key_id"] for key in found["keys"]] == [ids["worker"]]
    assert {key["key_id"] for key in get("reader", ACCOUNT).json["keys"]} == {ids["worker"], ids["reader"]}
    assert (found["tenant"], found["scopes"], found["endpoints"]) == ("acme", ["invoke"], None)
    price = next(one for one in found["prices"] if one["endpoint"] == "assistant")
    assert (price["input"], price["cached"], price["output"]) == ("2.00", "1.00", "3.00")
    assert not any(secret in get("reader", ACCOUNT).text for secret in secrets.values())


def test_recent_requests_are_the_newest_ones(get: Get, books: tuple[Ledger, dict[str, str], dict[str, str]]) -> None:
    """The newest come first, at most ``limit``; rows say status, times and tokens, and filters select."""
    ledger, _, ids = books
    for number in range(5):
        used(ledger, number, ids["worker"], "acme", adapter="pirate" if number == 2 else None)
    rows = get("operator", REQUESTS, limit=3).json["requests"]
    assert [row["started_ms"] for row in rows] == sorted((row["started_ms"] for row in rows), reverse=True)
    assert len(rows) == 3
    (row,) = get("operator", REQUESTS, adapter="pirate").json["requests"]
    assert (row["request_id"], row["status"], row["completion_tokens"], row["tenant"]) == ("r2", "ok", 2, "acme")
    assert {"started_ms", "ended_ms"} <= row.keys()
    assert get("worker", REQUESTS).status_code == 403


@pytest.mark.parametrize(
    ("query", "field"),
    [({"limit": "0"}, "limit"), ({"limit": "201"}, "limit"), ({"limit": "x"}, "limit"), ({"text": "a"}, "text")],
)
def test_mistakes_are_named(get: Get, query: dict[str, str], field: str) -> None:
    """A wrong parameter is a 400 that names it."""
    answer = get("operator", REQUESTS, **query)
    assert (answer.status_code, answer.json["message"].startswith(f"{field}: ")) == (400, True)


def test_usage_by_adapter(get: Get, books: tuple[Ledger, dict[str, str], dict[str, str]]) -> None:
    """Usage is summed by adapter, "" for the model itself, and selected by one."""
    ledger, _, ids = books
    for number in range(1, 4):
        used(ledger, number, ids["worker"], "acme", adapter="pirate" if number == 2 else None)
    sums = get("worker", "/api/2.0/usage", by="adapter").json["usage"]
    assert [(row["adapter"], row["completion_tokens"]) for row in sums] == [("", 4), ("pirate", 2)]
    (row,) = get("worker", "/api/2.0/usage", adapter="pirate").json["usage"]
    assert row["request_id"] == "r2"


def test_without_a_ledger_there_is_no_account(client: FlaskClient) -> None:
    """A server that keeps no ledger says which option makes one."""
    for path in (ACCOUNT, REQUESTS):
        answer = client.get(path)
        assert (answer.status_code, "--database" in answer.json["message"]) == (404, True)
