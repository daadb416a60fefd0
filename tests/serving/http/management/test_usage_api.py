"""``GET /api/2.0/usage`` over a real ledger, without a server around it."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Price, Reservation, Store

PATH = "/api/2.0/usage"


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, dict[str, str]]]:
    """Make ten requests of two tenants at two endpoints, and keys of acme, zeta, an operator and a reader."""
    root = tmp_path_factory.mktemp("books")
    store = Store(f"sqlite:///{root}/ledger.db")
    ledger, keys = Ledger(store, state_dir=root), Keys(store)
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    secrets = {
        "acme": keys.create("acme", scopes=("invoke", "usage"))[0],
        "zeta": keys.create("zeta", scopes=("invoke", "usage"))[0],
        "worker": keys.create("acme")[0],
        "operator": keys.create("ops", scopes=("manage",))[0],
        "reader": keys.create("acme", scopes=("usage",))[0],
    }
    for number in range(10):
        reservation = Reservation(
            request_id=f"r{number}",
            key_id="key_1",
            tenant="acme" if number < 6 else "zeta",
            endpoint=f"chat{number % 2}",
            entity="model-1",
            mode="pay_per_token",
            task="chat",
            input_tokens=10,
            max_output_tokens=20,
        )
        ledger.reserve(reservation).settle(completion=number, finish_reason="stop")
    yield ledger, secrets
    ledger.close()
    store.close()


@pytest.fixture
def guarded(make: Callable[..., WorkerState], books: tuple[Ledger, dict[str, str]]) -> FlaskClient:
    return create_app(make(keys=Keys(books[0].store), ledger=books[0])).test_client()


@pytest.fixture
def ask(guarded: FlaskClient, books: tuple[Ledger, dict[str, str]]) -> Callable[..., object]:
    def get(who: str | None, **parameters: object) -> object:
        headers = {"Authorization": f"Bearer {books[1].get(who, who)}"} if who else {}
        return guarded.get(PATH, query_string=parameters, headers=headers)

    return get


def ids(answer: object) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [row["request_id"] for row in answer.json["usage"]]


def test_a_key_sees_its_tenant_and_an_operator_all(ask: Callable[..., object]) -> None:
    """Keys with the scope "usage" see their own tenant, a key that manages sees every one; others see what they used
    themselves, and no neighbour's id, cost or reserved time."""
    assert ids(ask("acme")) == ids(ask("reader", tenant="acme")) == [f"r{n}" for n in range(6)]
    assert ids(ask("zeta")) == [f"r{n}" for n in range(6, 10)]
    assert ids(ask("operator")) == [f"r{n}" for n in range(10)]
    assert ids(ask("operator", tenant="zeta", endpoint="chat1")) == ["r7", "r9"]
    refused = ask("acme", tenant="zeta")
    assert (refused.status_code, refused.json["error_code"]) == (403, "PERMISSION_DENIED")
    assert ids(ask("worker")) == []
    assert ask("worker", by="tenant").json["usage"] == []
    refused = ask("worker", key_id="key_1")
    assert (refused.status_code, "key_id" in refused.json["message"]) == (403, True)
    assert ask(None).status_code == ask("sk-nobody").status_code == 401


def test_usage_in_pages(ask: Callable[..., object]) -> None:
    """The cursor of each page leads to the next one, up to the last row."""
    first = ask("operator", limit=7)
    rest = ask("operator", limit=7, cursor=first.json["next_cursor"])
    assert ids(first) + ids(rest) == [f"r{n}" for n in range(10)]
    assert rest.json["next_cursor"] is None


def test_usage_by_time(ask: Callable[..., object]) -> None:
    """The start is included and the end is not; days, ISO times and milliseconds are accepted."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    started = ask("operator").json["usage"][3]["started_ms"]
    assert len(ids(ask("operator", start=started))) + len(ids(ask("operator", end=started))) == 10
    assert ids(ask("operator", end="2026-01-01")) == []
    assert len(ids(ask("operator", start=f"{today}T00:00:00+00:00"))) in (0, 10)  # 0 across a midnight


def test_usage_in_sums(ask: Callable[..., object]) -> None:
    """Usage is summed by any columns, together with reserved throughput."""
    found = ask("operator", by="tenant,endpoint").json
    assert found["provisioned"] == []
    assert found["usage"][0] == {
        "tenant": "acme",
        "endpoint": "chat0",
        "requests": 3,
        "prompt_tokens": 30,
        "cached_tokens": 0,
        "completion_tokens": 6,
        "generated_tokens": 0,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "cost": "0.000042",
    }
    assert sum(total["completion_tokens"] for total in ask("zeta", by="day").json["usage"]) == 6 + 7 + 8 + 9


def test_usage_as_csv_and_parquet(ask: Callable[..., object], tmp_path: Path) -> None:
    """CSV and Parquet have every row that the key may see, and the same columns; money is exact."""
    reported = ask("acme", format="csv")
    rows = list(csv.DictReader(io.StringIO(reported.text)))
    assert reported.content_type.startswith("text/csv")
    assert [row["request_id"] for row in rows] == [f"r{n}" for n in range(6)]
    table = pq.read_table(io.BytesIO(ask("acme", format="parquet").data))
    assert table["completion_tokens"].to_pylist() == list(range(6))
    assert table.column_names == list(rows[0])
    assert [row["cost"] for row in rows[:2]] == ["0.00001", "0.000012"]
    assert table["cost"].to_pylist()[1] == Decimal("0.000012")


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"limit": "9" * 40}, "limit"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "WzEsIDFd"}, "cursor"),
        ({"start": "yesterday"}, "start"),
        ({"start": "9" * 30}, "start"),
        ({"start": "9" * 5000}, "start"),
        ({"start": "2026-02-01", "end": "2026-01-01"}, "end"),
        ({"tenant": ""}, "tenant"),
        ({"endpoint": "x" * 300}, "endpoint"),
        ({"entity": "a\0b"}, "entity"),
        ({"status": "fine"}, "status"),
        ({"by": "week"}, "by"),
        ({"by": "day,day"}, "by"),
        ({"by": "day", "limit": "5"}, "limit"),
        ({"format": "xml"}, "format"),
        ({"format": "csv", "cursor": "x"}, "cursor"),
        ({"tenants": "acme"}, "tenants"),
        ({"limit": ["1", "2"]}, "limit"),
    ],
)
def test_mistakes_are_named(ask: Callable[..., object], parameters: dict[str, object], field: str) -> None:
    """An error names the field, its value and what is allowed."""
    reported = ask("operator", **parameters)
    assert reported.status_code == 400
    assert reported.json["error_code"] == "INVALID_PARAMETER_VALUE"
    assert reported.json["message"].startswith(f"{field}: ")


def test_without_a_ledger_there_is_no_usage(client: FlaskClient) -> None:
    """A server that keeps no ledger says so; other methods are refused."""
    assert client.get(PATH).status_code == 404
    assert "--database" in client.get(PATH).json["message"]
    assert client.post(PATH).status_code == 405


def test_a_store_that_is_away_is_a_503(
    guarded: FlaskClient, books: tuple[Ledger, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store is unavailable the answer is a 503 with Retry-After."""
    from mlflow_llm.serving.interface.errors import Unavailable

    def away(*_: object, **__: object) -> None:
        raise Unavailable("the metering store does not answer", retry_after=1.0)

    guarded.get(PATH, headers={"Authorization": f"Bearer {books[1]['operator']}"})  # the key is known from here on
    monkeypatch.setattr(books[0].store, "read", away)
    reported = guarded.get(PATH, headers={"Authorization": f"Bearer {books[1]['operator']}"})
    assert (reported.status_code, reported.headers["Retry-After"]) == (503, "1")
    assert msgspec.json.decode(reported.data)["error_code"]
