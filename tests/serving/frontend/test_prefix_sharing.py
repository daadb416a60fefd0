"""``cache_salt`` and ``prefix_sharing`` over the routes, on one engine that servers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from instant_model import write_instant_model

from mlflow_llm.flavors.llm.model.signature import params_schema, request_fields
from mlflow_llm.serving.endpoints.config import config_to_wire
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http import routes
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.openapi import document as openapi
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints
from mlflow_llm.serving.testing.instant_engine import InstantEngine

CHAT = {"messages": [{"role": "user", "content": "What nobody else asks."}], "max_tokens": 1}
ROUTES = ("/v1/chat/completions", "/serving-endpoints/assistant/invocations", "/endpoints/assistant/invocations")
CONFIG = {"served_entities": [{"name": "m", "entity_name": "m", "entity_version": "1"}]}


@pytest.fixture
def servers(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[Callable[..., FlaskClient]]:
    """Return ``servers(prefix_sharing=…)``, which makes a client of a new server on the one engine."""
    engine = InstantEngine(write_instant_model(tmp_path / "cached", prefix_cache=True))

    def new(of_endpoint: str | None = None, **settings: object) -> FlaskClient:
        server = make(**settings)
        (endpoint,) = server.endpoints
        endpoints = ServedEndpoints(dataclasses.replace(endpoint, engine=engine, prefix_sharing=of_endpoint))
        return create_app(dataclasses.replace(server, endpoints=endpoints)).test_client()

    yield new
    engine.close()


def cached(client: FlaskClient, **more: Any) -> int:
    answer = client.post(ROUTES[0], json={"model": "assistant", **CHAT, **more})
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_two_servers_on_one_engine(servers: Callable[..., FlaskClient]) -> None:
    """Servers without keys that share an engine find their own cached prompts and none of each other's."""
    first, second = servers(), servers()
    assert cached(first) == 0
    assert cached(second) == 0
    assert cached(first) > 0
    assert cached(second) > 0


def test_a_cache_salt_separates_callers_without_keys(servers: Callable[..., FlaskClient]) -> None:
    """All callers of a server without keys share, unless they send salts of their own."""
    client = servers()
    assert [cached(client, cache_salt=salt) for salt in (None, "a", "b")] == [0, 0, 0]
    assert all(cached(client, cache_salt=salt) for salt in (None, "a", "b"))


def test_an_endpoint_s_own_sharing_wins(servers: Callable[..., FlaskClient]) -> None:
    """The server's prefix_sharing holds where the endpoint names none."""
    assert [cached(client) for client in [servers(prefix_sharing="off")] * 2] == [0, 0]
    assert [cached(client) for client in [servers(of_endpoint="off")] * 2] == [0, 0]
    assert [cached(client) > 0 for client in [servers("tenant", prefix_sharing="off")] * 2] == [False, True]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"], "\ud800"])
def test_a_salt_is_a_short_text(client: FlaskClient, path: str, salt: object) -> None:
    """An empty, overlong or non-text salt is refused by name in every dialect; null means none."""
    refused = client.post(path, json={"model": "assistant", **CHAT, "cache_salt": salt})
    assert refused.status_code == 400
    assert "cache_salt: " in refused.text
    for allowed in (None, "x" * 256):
        assert client.post(path, json={"model": "assistant", **CHAT, "cache_salt": allowed}).status_code == 200


def test_cache_salt_is_described() -> None:
    """The OpenAPI document of each route and a model's signature have it."""
    document = str(openapi.document(routes.ROUTES))
    assert document.count("'cache_salt': {'anyOf': [{'type': 'string', 'minLength': 1, 'maxLength': 256}") >= 3
    assert "cache_salt" in request_fields()
    assert "cache_salt" in {param.name for param in params_schema()}


@pytest.mark.parametrize("sharing", ["tenant", "endpoint", "off"])
def test_prefix_sharing_of_a_config(sharing: str) -> None:
    """The management API takes ``prefix_sharing`` and shows it; anything else is refused by its name."""
    config = config_body(CONFIG | {"prefix_sharing": sharing}, "config")
    assert config_to_wire(config)["prefix_sharing"] == sharing
    assert "prefix_sharing" not in config_to_wire(config_body(CONFIG, "config"))
    with pytest.raises(InvalidField, match=r"config.prefix_sharing: 'all' is not allowed"):
        config_body(CONFIG | {"prefix_sharing": "all"}, "config")
