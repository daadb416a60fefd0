"""The management API over HTTP, on a store that no reconciler follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.control.model_sources import locate
from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField, NotFound
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("schemathesis")
    import described
    from hypothesis import HealthCheck, settings

API = "/api/2.0/serving-endpoints"
CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
CHAT = {"name": "chat", "config": CONFIG}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path}/serving.db")
    yield opened
    opened.close()


@pytest.fixture
def managed(make: Callable[..., WorkerState], store: Store, instant_bundle: Bundle) -> Callable[..., FlaskClient]:
    """Return ``managed(**options of make)``, which makes a client of a server whose store has every model but
    "nothing".
    """

    def locate(entities: tuple) -> tuple[ModelSource, ...]:
        if any(entity.entity_name == "nothing" for entity in entities):
            raise NotFound("there is no model nothing")
        return tuple(ModelSource(uri=entity.uri, bundle=instant_bundle) for entity in entities)

    def build(**options: object) -> FlaskClient:
        return create_app(make(endpoint_store=EndpointStore(store, locate=locate), **options)).test_client()

    return build


def test_an_endpoint_over_http(managed: Callable[..., FlaskClient]) -> None:
    """An endpoint is created, listed, tagged, described and deleted; a duplicate is refused and an unknown one is a 404
    in Databricks' form.
    """
    client = managed()
    made = client.post(API, json=CHAT).json
    assert (made["name"], made["state"]["config_update"]) == ("chat", "IN_PROGRESS")
    assert made["pending_config"]["served_entities"][0]["name"] == "assistant-1"
    assert client.get(f"{API}/chat").json == made
    assert [endpoint["name"] for endpoint in client.get(API).json["endpoints"]] == ["chat"]
    tags = client.patch(f"{API}/chat/tags", json={"add_tags": [{"key": "team", "value": "a"}]})
    assert tags.json == {"tags": [{"key": "team", "value": "a"}]}
    assert list(client.get(f"{API}/chat/openapi").json["paths"]) == ["/serving-endpoints/chat/invocations"]
    assert client.get(f"{API}/chat/metrics").status_code == 200
    assert client.post(API, json=CHAT).json["error_code"] == "RESOURCE_ALREADY_EXISTS"
    assert client.put(f"{API}/chat/config", json=CONFIG).status_code == 409
    nothing = client.delete(f"{API}/chat/config")
    assert (nothing.status_code, nothing.json["error_code"]) == (409, "INVALID_STATE")
    assert client.delete(f"{API}/chat").json == {}
    gone = client.get(f"{API}/chat")
    assert (gone.status_code, gone.json["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "body"),
        (b"[]", 400, "body"),
        ({"name": "chat"}, 400, "config"),
        ({"name": "a b", "config": CONFIG}, 400, "name"),
        (
            {"name": "chat", "config": {"served_entities": [{"entity_name": "nothing", "entity_version": 1}]}},
            404,
            "nothing",
        ),
        (CHAT | {"colour": 1}, 400, "colour"),
        (CHAT | {"rate_limits": [{"calls": 1, "renewal_period": "minute"}]}, 409, "rate_limits"),
    ],
)
def test_bad_endpoints_are_refused_by_field(managed, body: object, status: int, named: str) -> None:
    """A bad endpoint is a 4xx that names the field, and nothing is created."""
    client = managed()
    raw = {"data": body, "content_type": "application/json"}
    answer = client.post(API, **raw) if isinstance(body, bytes) else client.post(API, json=body)
    assert (answer.status_code, named in answer.json["message"]) == (status, True), answer.json
    assert client.get(API).json == {"endpoints": []}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    ],
)
def test_pages_of_other_sites_do_not_manage_a_server_without_keys(
    managed: Callable[..., FlaskClient], headers: dict[str, str], status: int
) -> None:
    """A page of another site cannot manage a server without keys, neither by a plain form nor by DNS rebinding."""
    client = managed()
    answer = client.post(API, json=CHAT, headers=headers, base_url=f"http://{headers.get('Host', 'localhost')}")
    assert answer.status_code == status, answer.json
    assert len(client.get(API).json["endpoints"]) == (status == 200)


def test_a_reserve_without_a_ledger_is_refused_by_its_place() -> None:
    """Provisioned throughput without a ledger is refused with its field, before the model is looked up."""
    for asked in ({"min_provisioned_throughput": 5}, {"max_provisioned_throughput": 5}):
        config = config_body({"served_entities": [CONFIG["served_entities"][0] | asked]}, "")
        with pytest.raises(InvalidField, match=rf"^served_entities\[0\].{next(iter(asked))}: 5 .*--database"):
            locate(config.served_entities, {}, metered=False)


def test_rate_limits_are_the_ledgers(managed, make, store: Store, tmp_path: Path) -> None:
    """With a ledger, calls a minute are stored as its limits."""
    ledger = Ledger(store, state_dir=tmp_path / "state")
    client = managed(ledger=ledger)
    assert client.post(API, json=CHAT).status_code == 200
    rates = {"rate_limits": [{"calls": 7, "renewal_period": "minute"}]}
    assert client.put(f"{API}/chat/rate-limits", json=rates).json["rate_limits"][0]["calls"] == 7
    assert [(limit.subject, limit.value) for limit in Limits(store).list()] == [("chat", 7)]
    ledger.close()


def test_changes_need_the_scope_manage(managed, store: Store) -> None:
    """Any key may look, one that may manage may change and see all, and nobody without a key may do either."""
    keys = Keys(store)
    client = managed(keys=keys)
    headers = {
        scope: {"Authorization": f"Bearer {keys.create('team', scopes=(scope,))[0]}"} for scope in ("invoke", "manage")
    }
    assert client.post(API, json=CHAT).status_code == 401
    assert client.post(API, json=CHAT, headers=headers["invoke"]).status_code == 403
    made = client.post(API, json=CHAT, headers=headers["manage"])
    assert made.status_code == 200
    assert made.json["creator"].startswith("key_")
    for scope in headers:
        assert client.get(f"{API}/chat", headers=headers[scope]).status_code == 200
        seen = client.get(f"{API}/chat/metrics", headers=headers[scope]).status_code
        assert seen == (200 if scope == "manage" else 403)
    assert client.delete(f"{API}/chat", headers=headers["invoke"]).status_code == 403


@pytest.fixture(params=described.operations(of="^/api/2.0/serving-endpoints"))
def operation(request: pytest.FixtureRequest) -> object:
    return described.described(request.param)


@pytest.fixture
def client(managed: Callable[..., FlaskClient]) -> FlaskClient:
    return managed()


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@described.by_fixture("operation").parametrize()
def test_no_management_request_is_a_5xx(case, client: FlaskClient) -> None:
    """Requests within the documented schema, and near it, never get a 5xx."""
    client.post(API, json=CHAT)
    kwargs = case.as_transport_kwargs(base_url="http://localhost")
    headers = {k: v for k, v in (kwargs.get("headers") or {}).items() if "\n" not in v and "\r" not in v}
    path = kwargs["url"].removeprefix("http://localhost")
    body = {"json": kwargs["json"]} if "json" in kwargs else {"data": kwargs.get("data")}
    answer = client.open(path, method=kwargs["method"], headers=headers, **body)
    assert answer.status_code < 500, answer.text
