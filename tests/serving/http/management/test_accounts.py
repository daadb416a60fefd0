"""Keys, limits, prices and the audit log over HTTP, and by the commands with ``--url``."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.management.paths import AUDIT, CURRENCY, KEYS, LIMITS, PRICES
from mlflow_llm.serving.metering import (
    Audit,
    AuditFilter,
    Keys,
    Ledger,
    Limits,
    Price,
    Prices,
    ProvisionedMinutes,
    Reservation,
    Store,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("schemathesis")
    import described
    from hypothesis import HealthCheck, settings


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    store = Store(f"sqlite:///{tmp_path}/serving.db")
    opened = Ledger(store, state_dir=tmp_path / "state")
    yield opened
    opened.close()
    store.close()


@pytest.fixture
def store(ledger: Ledger) -> Store:
    return ledger.store


@pytest.fixture
def server(make: Callable[..., WorkerState], ledger: Ledger) -> WorkerState:
    return make(keys=Keys(ledger.store), ledger=ledger)


@pytest.fixture
def operator(store: Store) -> str:
    return Keys(store).create("ops", scopes=("manage",))[0]


@pytest.fixture
def client(server: WorkerState, operator: str) -> FlaskClient:
    made = create_app(server).test_client()
    made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {operator}"
    return made


def test_a_keys_life(client: FlaskClient) -> None:
    """A key is created with its limits, listed, changed, rotated and revoked; its secret is shown only on creation,
    uncached.
    """
    made = client.post(KEYS, json={"tenant": "acme", "expires": "90d", "limits": {"qph": 5, "budget": "2.50"}})
    assert (made.status_code, made.headers["Cache-Control"]) == (200, "no-store")
    secret, key = made.json["secret"], made.json["key"]
    own = {"Authorization": f"Bearer {secret}"}
    assert client.get("/v1/models", headers=own).status_code == 200
    assert [one["key_id"] for one in client.get(KEYS, query_string={"tenant": "acme"}).json["keys"]] == [key["key_id"]]
    limits = client.get(LIMITS, query_string={"scope": "key", "subject": key["key_id"]}).json["limits"]
    assert [(limit["kind"], limit["value"]) for limit in limits] == [("budget", "2.50"), ("qph", 5)]
    place = f"{KEYS}/{key['key_id']}"
    changed = client.patch(place, json={"endpoints": ["other"], "name": "ci"}).json["key"]
    assert (changed["endpoints"], changed["name"]) == (["other"], "ci")
    rotated = client.post(f"{place}/rotate", json={"overlap": "0"}).json
    assert rotated["secret"] not in (secret, client.get(place).text)
    assert client.get("/v1/models", headers=own).status_code == 401
    assert client.delete(place).json["key"]["state"] == "revoked"
    assert client.patch(place, json={"name": "x"}).status_code == 409
    assert client.get(f"{KEYS}/key_none").status_code == 404


def test_limits_and_prices(client: FlaskClient, store: Store) -> None:
    """Limits and prices are set, listed and removed; money is decimal text in the store's currency."""
    assert client.get(CURRENCY).json == {"currency": ""}
    assert client.put(CURRENCY, json={"currency": "EUR"}).json == {"currency": "EUR"}
    reported = client.put(LIMITS, json={"scope": "tenant", "subject": "a/b c", "limits": {"budget_month": "25"}}).json
    assert (reported["currency"], reported["limits"][0]["value"]) == ("EUR", "25.00")
    assert reported["notes"] == ["no key belongs to tenant 'a/b c'; the limit applies once a key or a token does"]
    assert client.put(LIMITS, json={"scope": "tenant", "subject": "ops", "limits": {"qpm": 100}}).json["notes"] == []
    assert client.delete(LIMITS, query_string={"scope": "tenant", "subject": "ops", "kind": "qpm"}).status_code == 200
    noted = client.put(LIMITS, json={"scope": "endpoint", "subject": "chat", "limits": {"qpm": 1}}).json["notes"]
    assert "no endpoint 'chat' yet" in noted[0]
    assert (
        client.delete(LIMITS, query_string={"scope": "tenant", "subject": "a/b c", "kind": "budget_month"}).json == {}
    )
    assert [limit.subject for limit in Limits(store).list()] == ["chat"]
    priced = client.put(PRICES, json={"entity": "*", "input": "3", "output": "15.000001"}).json
    assert (priced["price"]["cached"], priced["price"]["output"], priced["notes"]) == ("3.00", "15.000001", [])
    noted = client.put(PRICES, json={"entity": "typo", "input": "3"}).json["notes"]
    assert "no endpoint serves 'typo'" in noted[0]
    assert len(client.get(PRICES).json["prices"]) == 2
    assert client.delete(PRICES, query_string={"entity": "typo"}).json == {}
    assert client.delete(PRICES, query_string={"entity": "typo"}).status_code == 404
    assert [row[0] for row in Prices(store).list()] == ["*"]


def test_every_change_is_in_the_audit_log(client: FlaskClient) -> None:
    """The audit log has each change with the key's id, the request's id and no secret."""
    made = client.post(KEYS, json={"tenant": "acme"}, headers={"X-Request-Id": "made-1"}).json
    entry = client.get(AUDIT, query_string={"target": made["key"]["key_id"]}).json["audit"][0]
    assert (entry["action"], entry["via"], entry["request_id"], entry["tenant"]) == (
        "key.create",
        "http",
        "made-1",
        "ops",
    )
    assert made["secret"] not in client.get(AUDIT).text
    assert len(client.get(AUDIT, query_string={"limit": "1"}).json["audit"]) == 1


def test_accounts_take_the_scope_manage(client: FlaskClient, server: WorkerState, store: Store) -> None:
    """Every route is a 403 without the scope manage, a 401 without a key, and a 404 without a ledger."""
    other = {"Authorization": f"Bearer {Keys(store).create('acme', scopes=('invoke', 'usage'))[0]}"}
    places = [("GET", path) for path in (KEYS, LIMITS, PRICES, CURRENCY, AUDIT)] + [("POST", KEYS), ("PUT", PRICES)]
    for method, path in places:
        assert client.open(path, method=method, headers=other, json={}).status_code == 403
        assert client.open(path, method=method, headers={"Authorization": ""}, json={}).status_code == 401
    unmetered = create_app(dataclasses.replace(server, ledger=None)).test_client()
    unmetered.environ_base = client.environ_base
    assert unmetered.get(KEYS).status_code == 404
    assert len(Keys(store).list()) == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", KEYS, {}, "tenant"),
        ("POST", KEYS, {"tenant": "a\x00b"}, "tenant"),
        ("POST", KEYS, {"tenant": "a", "scopes": ["root"]}, "scopes[0]"),
        ("POST", KEYS, {"tenant": "a", "expires": "yesterday"}, "expires"),
        ("POST", KEYS, {"tenant": "a", "expires": "2020-01-01"}, "expires"),
        ("POST", KEYS, {"tenant": "a", "endpoints": []}, "endpoints"),
        ("POST", KEYS, {"tenant": "a", "limits": {"speed": 1}}, "limits.speed"),
        ("POST", KEYS, {"tenant": "a", "limits": {"budget": 2.5}}, "limits.budget"),
        ("POST", KEYS, {"tenant": "a", "colour": 1}, "colour"),
        ("PUT", LIMITS, {"scope": "tenant", "subject": "a", "limits": {}}, "limits"),
        ("PUT", LIMITS, {"scope": "tenant", "subject": "a", "limits": {"qph": -1}}, "limits.qph"),
        ("PUT", PRICES, {"entity": "m"}, "input"),
        ("PUT", PRICES, {"entity": "m", "input": "1", "cached": "2"}, "cached"),
        ("PUT", PRICES, {"entity": "m", "input": 1.5}, "input"),
        ("PUT", PRICES, {"entity": "m", "input": "1", "effective": "2020-01-01"}, "effective"),
        ("PUT", CURRENCY, {"currency": "€"}, "currency"),
        ("GET", f"{AUDIT}?limit=0", None, "limit"),
        ("GET", f"{AUDIT}?action=x", None, "action"),
        ("GET", f"{AUDIT}?colour=x", None, "colour"),
        ("GET", f"{AUDIT}?cursor={'9' * 19}", None, "cursor"),
        ("GET", f"{LIMITS}?scope=x", None, "scope"),
        ("DELETE", f"{LIMITS}?scope=tenant", None, "subject"),
        ("DELETE", PRICES, None, "entity"),
        ("DELETE", f"{PRICES}?entity=m&effective_ms=x", None, "effective_ms"),
    ],
)
def test_mistakes_are_named(client: FlaskClient, method: str, path: str, body: object, field: str) -> None:
    """An error names the field, its value and what is allowed, and nothing is changed."""
    before = len(client.get(AUDIT).json["audit"])
    answer = client.open(path, method=method, json=body)
    assert (answer.status_code, answer.json["message"].partition(":")[0]) == (400, field), answer.json
    assert len(client.get(AUDIT).json["audit"]) == before


@pytest.fixture(params=described.operations(of="^/api/2.0/(keys|limits|prices|currency|audit)"))
def operation(request: pytest.FixtureRequest) -> object:
    return described.described(request.param)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@described.by_fixture("operation").parametrize()
def test_no_request_is_a_5xx(case, client: FlaskClient) -> None:
    """Requests within the documented schema, and near it, never get a 5xx."""
    kwargs = case.as_transport_kwargs(base_url="http://localhost")
    path = kwargs["url"].removeprefix("http://localhost")
    body = {"json": kwargs["json"]} if "json" in kwargs else {"data": kwargs.get("data")}
    answer = client.open(path, method=kwargs["method"], query_string=kwargs.get("params"), **body)
    assert answer.status_code < 500, answer.text


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(server: WorkerState) -> Iterator[str]:
    with make_server("127.0.0.1", 0, create_app(server), handler_class=Quiet) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_commands_over_http(url: str, operator: str, store: Store, tmp_path: Path) -> None:
    """Commands do the same over HTTP as on a database, with a key from a file, the environment or standard input."""
    file = tmp_path / "key"
    file.write_text(operator + "\n")

    def run(*words: str, **options: object) -> str:
        done = CliRunner().invoke(cli, [*words, "--url", url], **options)
        assert done.exit_code == 0, done.output
        return done.stdout

    secret = run("keys", "create", "--tenant", "acme", "--expires", "1d", "--key-file", str(file)).strip()
    key_id = Keys(store).verify(secret).key_id
    assert key_id in run("keys", "list", "--key", f"@{file}")
    environment = {"MLFLOW_LLM_KEY": operator, "MLFLOW_LLM_DATABASE": "sqlite:////nowhere/else.db"}
    newer = run("keys", "rotate", key_id, env=environment).strip()
    assert Keys(store).verify(newer).key_id == key_id
    assert run("prices", "currency", "EUR", "--key", "-", input=operator + "\n") == "EUR\n"
    reported = run("limits", "set", "key", key_id, "budget=2.5", env=environment)
    assert reported == f"key {key_id}: 2.50 EUR in all\n"
    assert run("prices", "set", "*", "--input", "3", env=environment).startswith("*: 3.00 EUR in, 3.00 EUR cached")
    assert run("keys", "revoke", key_id, env=environment) == f"revoked {key_id}\n"
    assert "key.revoke" in run("audit", "--action", "key.revoke", env=environment)
    assert {entry.via for entry in Audit(store).page(AuditFilter(target=key_id))[0]} <= {"http", "python"}
    refused = CliRunner().invoke(cli, ["keys", "list", "--url", url, "--key", "sk-wrong"])
    assert (refused.exit_code, "401" in refused.stderr) == (1, True)


def test_the_bill_over_http(url: str, operator: str, ledger: Ledger, tmp_path: Path) -> None:
    """Sums, rows and files are those of the database; a tenant's key sees its tenant, and no more."""
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    ledger.prices.set("p", Price(unit_minute=10**15))  # a bill of more than a thousand million
    ProvisionedMinutes(ledger.store, prices=ledger.prices, clock=lambda: ledger.now_ms() / 1000).record(
        tenant="acme", endpoint="chat", entity="p", units=7
    )
    for number in range(5):
        tenant = "acme" if number < 3 else "zeta"
        asked = {"key_id": f"key_{tenant}", "tenant": tenant, "endpoint": "chat", "entity": "m", "task": "chat"}
        asked |= {"mode": "pay_per_token", "input_tokens": 10, "max_output_tokens": 20, "request_id": f"r{number}"}
        ledger.reserve(Reservation(**asked)).settle(completion=number, finish_reason="stop")

    def bill(*words: str) -> str:
        done = CliRunner().invoke(cli, ["usage", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    database = ["--database", str(ledger.store.engine.url)]
    served = ["--url", url, "--key", operator]
    for asked in (
        ["--start", "2020-01-01"],
        ["--by", "entity,key_id", "--tenant", "acme"],
        ["--json"],
        ["--end", "1971-01-01"],
    ):
        assert bill(*served, *asked) == bill(*database, *asked)
    written = []
    for place in (served, database):
        bill(*place, "--csv", str(tmp_path / "a.csv"), "--parquet", str(tmp_path / "a.parquet"))
        written.append(((tmp_path / "a.csv").read_text(), pq.read_table(tmp_path / "a.parquet").to_pylist()))
    assert written[0] == written[1]
    assert len(written[0][1]) == 5
    bill(*served, "--plot", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    secret, _ = Keys(ledger.store).create("zeta", scopes=("usage",))
    (own,) = json.loads(bill("--url", url, "--key", secret, "--by", "tenant", "--json"))["usage"]
    assert (own["tenant"], own["requests"], own["completion_tokens"]) == ("zeta", 2, 7)
    refused = CliRunner().invoke(cli, ["usage", "--url", url, "--key", secret, "--tenant", "acme"])
    assert (refused.exit_code, "403: tenant: the key belongs to tenant 'zeta'" in refused.stderr) == (1, True)


def test_an_allow_list_with_unknown_endpoints(url: str, operator: str, store: Store) -> None:
    """An allow list may name an endpoint that is not served yet, with a warning, on a server as on a database."""
    database = str(store.engine.url)
    for place in (["--url", url, "--key", operator], ["--database", database]):
        made = CliRunner().invoke(cli, ["keys", "create", *place, "--endpoint", "typo:pirate", "--endpoint", "typo"])
        assert (made.exit_code, made.stderr.count("note: ")) == (0, 1), made.output
        reported = "note: there is no endpoint 'typo' yet; the key may use it once there is; served is nothing\n"
        assert reported in made.stderr
        key_id = made.stderr.split()[1]
        changed = CliRunner().invoke(cli, ["keys", "update", *place, key_id, "--endpoint", "other"])
        assert (changed.exit_code, "no endpoint 'other'" in changed.stderr) == (0, True)
        changed = CliRunner().invoke(cli, ["keys", "update", *place, key_id, "--endpoint", "*"])
        assert (changed.exit_code, changed.stderr) == (0, "")


def test_commands_on_a_server_or_a_database(tmp_path: Path) -> None:
    """A command refuses both a database and a server, and neither."""
    for words, reported in (
        (["--url", "http://x", "--database", "sqlite:///x.db"], "give one of them"),
        ([], "name a database with --database, or a server with --url"),
    ):
        done = CliRunner().invoke(cli, ["keys", "list", *words], env={"MLFLOW_LLM_DATABASE": "", "MLFLOW_LLM_URL": ""})
        assert (done.exit_code, reported in done.stderr) == (2, True), done.output
