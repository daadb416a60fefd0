"""A model's default adapter and request defaults hold on a server as they do in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.cli.model_options import request_fields
from mlflow_llm.serving.control import model_sources as registry
from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel, check_defaults
from mlflow_llm.serving.dialects.fields.defaults import defaults_of
from mlflow_llm.serving.endpoints.config import config_to_wire
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoint

CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
DEFAULTS = {"max_tokens": 7, "temperature": 0, "stop": "zzz", "seed": 5}


@pytest.fixture
def client(make: Callable[..., WorkerState]) -> FlaskClient:
    """Return a client of ``assistant``, logged with a default adapter and defaults."""
    server = make()
    (endpoint,) = server.endpoints.entities()
    view = dataclasses.replace(endpoint.view, default_adapter="pirate", defaults=defaults_of(DEFAULTS))
    changed = dataclasses.replace(endpoint, view=view)
    server.endpoints.replace((ServedEndpoint(name="assistant", entities={endpoint.entity: changed}),))
    return create_app(server).test_client()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/serving-endpoints/assistant/invocations", "/invocations", "/v1/completions"]
)
def test_defaults_fill_what_a_request_leaves_out(client: FlaskClient, path: str) -> None:
    """Defaults apply on every route to whole replies, which name the default adapter."""
    body = {"model": "assistant", "prompt": "Hi", "ignore_eos": True} if path == "/v1/completions" else CHAT
    reply = client.post(path, json=body).json
    assert (reply["usage"]["completion_tokens"], reply["model"]) == (7, "assistant:pirate")
    given = client.post(path, json=body | {"temperature": 0, "seed": 5, "max_tokens": 7}).json
    assert given["choices"] == reply["choices"]


def test_a_requests_own_fields_win(client: FlaskClient) -> None:
    """A request's own value, under any of the field's names, replaces the default."""
    for own in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        assert client.post("/v1/chat/completions", json=CHAT | own).json["usage"]["completion_tokens"] == 3
    drawn = [
        client.post("/v1/chat/completions", json=CHAT | {"temperature": 2, "seed": seed}).json["choices"]
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]


def test_fields_that_a_task_lacks_are_left_out(client: FlaskClient) -> None:
    """An embedding ignores a default temperature, and uses the default encoding if it gives none."""
    assert defaults_of(DEFAULTS)("embeddings") is None
    body = {"model": "assistant", "input": "Hi"}
    assert isinstance(client.post("/v1/embeddings", json=body).json["data"][0]["embedding"], list)
    read = defaults_of({"encoding_format": "base64", "max_tokens": 1})("embeddings")
    assert read is not None
    assert read.encoding_format == "base64"  # type: ignore[union-attr]


def test_a_default_max_tokens_gives_way_to_the_context(client: FlaskClient, make: Callable[..., WorkerState]) -> None:
    """A default max_tokens is reduced to the room in the context and never refuses a request."""
    server = make()
    (endpoint,) = server.endpoints.entities()
    long = dataclasses.replace(endpoint.view, defaults=defaults_of({"max_tokens": 10**6, "min_tokens": 10}))
    changed = dataclasses.replace(endpoint, view=long)
    server.endpoints.replace((ServedEndpoint(name="assistant", entities={endpoint.entity: changed}),))
    asked = create_app(server).test_client()
    assert asked.post("/v1/chat/completions", json=CHAT).status_code == 200
    reply = asked.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3})
    assert (reply.status_code, reply.json["usage"]["completion_tokens"]) == (200, 3)


def test_defaults_of_an_endpoint(monkeypatch: pytest.MonkeyPatch, instant_bundle: Bundle) -> None:
    """An endpoint's defaults override the model's and are shown merged; an invalid one is refused with its path."""
    saved = {"generation_config": {"temperature": 0.6, "top_k": 20}, "defaults": {"max_tokens": 7, "stop": "x"}}
    monkeypatch.setattr(registry, "resolve", lambda uris: (ResolvedModel(bundle=instant_bundle, config=saved),))
    given = {"temperature": 0.1, "top_k": None}
    body = {"served_entities": [{"entity_name": "m", "entity_version": 1, "defaults": given}]}
    config = config_body(body, "")
    (source,) = registry.locate(config.served_entities, {})
    expected = {"temperature": 0.1, "max_tokens": 7, "stop": "x"}
    assert source.defaults == expected
    entity = msgspec.structs.replace(config.served_entities[0], source=source)
    (shown,) = config_to_wire(msgspec.structs.replace(config, served_entities=(entity,)))["served_entities"]
    assert (shown["defaults"], shown["request_defaults"]) == (given, expected)
    for wrong, reported in (({"temprature": 1}, "did you mean 'temperature'"), ({"top_p": 7}, "7 is not allowed")):
        body["served_entities"][0]["defaults"] = wrong
        with pytest.raises(InvalidField, match=rf"^served_entities\[0\]\.defaults\.\w+: .*{reported}"):
            registry.locate(config_body(body, "").served_entities, {})


def test_defaults_of_the_command_line() -> None:
    """``-D FIELD=VALUE`` is parsed as JSON where it can be, and an invalid default is refused by name."""
    assert request_fields(("temperature=0", "stop=x", "top_k=null")) == {"temperature": 0, "stop": "x", "top_k": None}
    with pytest.raises(InvalidField, match=r"^-D\.max_token: .*did you mean 'max_tokens'"):
        request_fields(("max_token=1",))


def test_defaults_that_a_task_does_not_take(instant_bundle: Bundle) -> None:
    """Defaults that a task does not take are refused by name before anything is served."""
    assert ResolvedModel(bundle=instant_bundle, config={"defaults": DEFAULTS}).defaults == DEFAULTS
    assert ResolvedModel(bundle=instant_bundle).defaults == {}
    check_defaults(DEFAULTS, instant_bundle)
    with pytest.raises(PackagingError, match=r"^defaults: temperature: 9 is not allowed"):
        check_defaults({"temperature": 9}, instant_bundle)
