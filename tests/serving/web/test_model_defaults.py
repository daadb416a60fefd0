"""A model's default adapter and request defaults hold on a server as they do in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.dialects.defaults import defaults_of
from mlflow_llm.serving.errors import PackagingError
from mlflow_llm.serving.web.app import create_app
from mlflow_llm.serving.web.endpoints import Routed
from mlflow_llm.serving.web.entry import Resolved, _check_defaults
from mlflow_llm.serving.web.invoke import Server

CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
DEFAULTS = {"max_tokens": 7, "temperature": 0, "stop": "zzz", "seed": 5}


@pytest.fixture
def client(make: Callable[..., Server]) -> FlaskClient:
    """``assistant`` was logged with a default adapter and defaults."""
    server = make()
    (endpoint,) = server.endpoints.entities()
    view = dataclasses.replace(endpoint.view, default_adapter="pirate", defaults=defaults_of(DEFAULTS))
    changed = dataclasses.replace(endpoint, view=view)
    server.endpoints.replace((Routed(name="assistant", entities={endpoint.entity: changed}),))
    return create_app(server).test_client()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/serving-endpoints/assistant/invocations", "/invocations", "/v1/completions"]
)
def test_what_a_request_does_not_say(client: FlaskClient, path: str) -> None:
    """The defaults' values on every route, for whole replies and the adapter's name in them."""
    body = {"model": "assistant", "prompt": "Hi", "ignore_eos": True} if path == "/v1/completions" else CHAT
    reply = client.post(path, json=body).json
    assert (reply["usage"]["completion_tokens"], reply["model"]) == (7, "assistant:pirate")
    given = client.post(path, json=body | {"temperature": 0, "seed": 5, "max_tokens": 7}).json
    assert given["choices"] == reply["choices"]


def test_what_a_request_says_wins(client: FlaskClient) -> None:
    """A value of its own, or another name of the field, replaces the default."""
    for own in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        assert client.post("/v1/chat/completions", json=CHAT | own).json["usage"]["completion_tokens"] == 3
    drawn = [
        client.post("/v1/chat/completions", json=CHAT | {"temperature": 2, "seed": seed}).json["choices"]
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]


def test_fields_that_a_task_lacks_are_left_out(client: FlaskClient) -> None:
    """An embedding takes no temperature, and its encoding is the default's only where it says none."""
    assert defaults_of(DEFAULTS)("embeddings") is None
    body = {"model": "assistant", "input": "Hi"}
    assert isinstance(client.post("/v1/embeddings", json=body).json["data"][0]["embedding"], list)
    read = defaults_of({"encoding_format": "base64", "max_tokens": 1})("embeddings")
    assert read is not None
    assert read.encoding_format == "base64"  # type: ignore[union-attr]


def test_defaults_that_a_task_does_not_take(instant_bundle: Bundle) -> None:
    """Are refused before anything is served, by name."""
    assert Resolved(bundle=instant_bundle, config={"defaults": DEFAULTS}).defaults == DEFAULTS
    assert Resolved(bundle=instant_bundle).defaults == {}
    _check_defaults(DEFAULTS, instant_bundle)
    with pytest.raises(PackagingError, match=r"^defaults: temperature: 9 is not allowed"):
        _check_defaults({"temperature": 9}, instant_bundle)
