"""The endpoints that keys of each scope can see and use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Audit, AuditFilter, Keys, Store

API = "/api/2.0/serving-endpoints"
CONFIG = {"served_entities": [{"entity_name": "models:/secret-project/1", "name": "one"}]}
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path}/serving.db")
    yield opened
    opened.close()


@pytest.fixture
def client(make: Callable[..., WorkerState], store: Store, instant_bundle: Bundle) -> FlaskClient:
    """Return a client of a server of ``assistant``, with ``assistant`` and ``other`` in its store."""
    managed = EndpointStore(
        store, locate=lambda entities: tuple(ModelSource(uri=one.uri, bundle=instant_bundle) for one in entities)
    )
    for name in ("assistant", "other"):
        managed.create({"name": name, "config": CONFIG, "tags": [{"key": "team", "value": "a"}]})
    return create_app(make(keys=Keys(store), endpoint_store=managed)).test_client()


@pytest.fixture
def key(store: Store) -> Callable[..., dict[str, str]]:
    """Return ``key(*scopes, endpoints=…)``, which makes the headers of a new key."""

    def make(*scopes: str, endpoints: tuple[str, ...] | None = None) -> dict[str, str]:
        secret, _ = Keys(store).create("team", scopes=scopes, endpoints=endpoints)
        return {"Authorization": f"Bearer {secret}"}

    return make


def test_the_permission_level_is_the_callers(client: FlaskClient, key: Callable[..., dict[str, str]]) -> None:
    """The permission level is CAN_MANAGE, CAN_QUERY or CAN_VIEW; models, settings, tags and people are shown to
    managers alone.
    """
    for scopes, level in ((("manage",), "CAN_MANAGE"), (("invoke", "usage"), "CAN_QUERY"), (("usage",), "CAN_VIEW")):
        found = client.get(f"{API}/assistant", headers=key(*scopes)).json
        assert found["permission_level"] == level
        seen = {"creator", "tags", "pending_config", "description"} & found.keys()
        assert seen == ({"creator", "tags", "pending_config", "description"} if level == "CAN_MANAGE" else set())
        assert ("secret-project" in str(found)) == (level == "CAN_MANAGE")


def test_a_key_sees_the_endpoints_of_its_list(client: FlaskClient, key: Callable[..., dict[str, str]]) -> None:
    """Endpoints outside a key's list are hidden from it in lists, by name and in errors."""
    limited = key("invoke", endpoints=("other",))
    assert [one["name"] for one in client.get(API, headers=limited).json["endpoints"]] == ["other"]
    assert client.get(f"{API}/assistant", headers=limited).status_code == 404
    assert client.get("/v1/models", headers=limited).json["data"] == []
    assert client.get("/api/2.0/endpoints/", headers=limited).json["endpoints"] == []
    refused = client.post("/v1/chat/completions", json=ASK | {"model": "assistant"}, headers=limited)
    nowhere = client.post("/v1/chat/completions", json=ASK | {"model": "nowhere"}, headers=limited)
    assert refused.status_code == nowhere.status_code == 404
    assert refused.text.replace("assistant", "nowhere") == nowhere.text
    own = client.post("/serving-endpoints/assistant/invocations", json=ASK, headers=limited)
    assert (own.status_code, own.json["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


def test_a_key_may_use_the_endpoints_of_its_list(client: FlaskClient, key: Callable[..., dict[str, str]]) -> None:
    """A key may use the endpoints of its list; one for an adapter alone may not use the base model."""
    assert client.post("/invocations", json=ASK, headers=key("invoke", endpoints=("assistant",))).status_code == 200
    adapter_only = key("invoke", endpoints=("assistant:legal",))
    refused = client.post("/invocations", json=ASK, headers=adapter_only)
    assert (refused.status_code, "with an adapter only" in refused.json["message"]) == (404, True)
    other = client.post("/invocations", json=ASK | {"adapter": "tax"}, headers=adapter_only)
    assert (other.status_code, "tax" in other.json["message"]) == (404, True)


def test_a_model_path_is_shown_to_managers_alone(
    client: FlaskClient, key: Callable[..., dict[str, str]], make: Callable[..., WorkerState], store: Store
) -> None:
    """A served model's URI is shown to managers alone; others see the endpoint's name."""
    from dataclasses import replace

    from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints, ServedEntity

    server = make(keys=Keys(store))
    endpoint: ServedEntity = next(iter(server.endpoints))
    server = replace(server, endpoints=ServedEndpoints(replace(endpoint, entity="/srv/models/secret")))
    client = create_app(server).test_client()
    for headers, shown in ((key("invoke", "manage"), "/srv/models/secret"), (key("invoke"), "assistant")):
        assert client.get("/v1/models", headers=headers).json["data"][0]["root"] == shown
        assert client.post("/invocations", json=ASK, headers=headers).headers["served-model-name"] == shown


def test_health_names_no_endpoint_to_strangers(client: FlaskClient, key: Callable[..., dict[str, str]]) -> None:
    """Without a key health has the status alone; with one it has the endpoints that the key may use."""
    assert client.get("/health").json == {"status": "OK"}
    assert client.get("/health", headers={"Authorization": "Bearer sk-wrong"}).json == {"status": "OK"}
    assert list(client.get("/health", headers=key("invoke")).json["endpoints"]) == ["assistant"]
    assert client.get("/health", headers=key("invoke", endpoints=("other",))).json["endpoints"] == {}


def test_bad_keys_at_open_routes_count_as_refusals(
    make: Callable[..., WorkerState], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown keys at a probe count as refusals of their sender, and after too many are not looked up; public pages
    look up none.
    """
    keys = Keys(store)
    server = make(keys=keys, refusals_per_minute=3)
    client = create_app(server).test_client()
    tried = []
    monkeypatch.setattr(keys, "verify", lambda secret, scope: tried.append(secret) or Keys(store).verify(secret))
    for number in range(20):
        headers = {"Authorization": f"Bearer sk-{number}"}
        assert client.get("/health", headers=headers).json == {"status": "OK"}
        assert client.get("/ping", headers=headers).status_code == 200
    assert 3 <= len(tried) < 10


def test_changes_by_http_are_audited(client: FlaskClient, key: Callable[..., dict[str, str]], store: Store) -> None:
    """The audit log has each HTTP change with the key's id, the request's id and the states before and after."""
    headers = key("manage") | {"X-Request-Id": "change-1"}
    tags = {"delete_tags": ["team"]}
    assert client.patch(f"{API}/other/tags", json=tags, headers=headers).status_code == 200
    assert client.delete(f"{API}/other", headers=headers).status_code == 200
    gone, changed = Audit(store).page(AuditFilter(target="other"))[0][:2]
    assert (changed.action, changed.before, changed.after) == ("endpoint.tags", [{"key": "team", "value": "a"}], [])
    assert (changed.request_id, changed.via, changed.tenant) == ("change-1", "http", "team")
    assert changed.actor.startswith("key_")
    assert (gone.action, gone.before["config"]["served_entities"][0]["name"], gone.after) == (
        "endpoint.delete",
        "one",
        None,
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_tokens_and_scores_are_for_who_may_invoke(
    client: FlaskClient, key: Callable[..., dict[str, str]], path: str, body: dict[str, object]
) -> None:
    """Tokenising and scoring without a key, or with one of another scope or endpoint, is refused in OpenAI's form."""
    asked = body | {"model": "assistant"}
    answers = [
        client.post(path, json=asked, headers=headers)
        for headers in ({}, key("usage"), key("invoke", endpoints=("other",)), key("invoke"))
    ]
    assert [answer.status_code for answer in answers] == [401, 403, 404, 200]
    assert all(set(answer.json["error"]) == {"message", "type", "param", "code"} for answer in answers[:3])
