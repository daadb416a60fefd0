"""``/api/2.0/prompts``: who may read and save, what is refused, and a server without a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.control.mlflow_processes.prompt_registry import PromptRegistry
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.management.paths import PROMPTS
from mlflow_llm.serving.metering import Keys, Store

FOUND = {"prompts": [{"name": "greeting", "description": ""}], "more": False}


class Registry:
    """MLflow's side: it records the questions and gives ``answer``."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.answer: dict[str, Any] = FOUND

    def __call__(self, question: Mapping[str, Any], timeout: float) -> Any:
        self.asked.append(question)
        return self.answer


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def client(make: Callable[..., WorkerState], registry: Registry) -> FlaskClient:
    return create_app(make(prompts=PromptRegistry(ask=registry))).test_client()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path}/keys.db", make=True)
    yield opened
    opened.close()


def test_a_server_without_a_registry_says_so(make: Callable[..., WorkerState]) -> None:
    """Each route is a 404 that names the variables."""
    client = create_app(make()).test_client()
    for answer in (
        client.get(PROMPTS),
        client.get(f"{PROMPTS}/a"),
        client.post(PROMPTS, json={"name": "a", "template": "b"}),
    ):
        assert (answer.status_code, "MLFLOW_TRACKING_URI" in answer.json["message"]) == (404, True)


def test_questions_reach_the_registry(client: FlaskClient, registry: Registry) -> None:
    """Parameters and bodies are passed on as they were checked."""
    assert client.get(PROMPTS, query_string={"search": "greet", "limit": 7}).json == FOUND
    client.get(f"{PROMPTS}/greeting", query_string={"version": "production"})
    chat = [{"role": "user", "content": "Hi {{who}}"}]
    client.post(PROMPTS, json={"name": "greeting", "template": chat, "commit_message": "new", "model_config": None})
    assert registry.asked == [
        {"call": "search", "arguments": {"words": "greet", "limit": 7}},
        {"call": "load", "arguments": {"name": "greeting", "version": "production"}},
        {"call": "save", "arguments": {"name": "greeting", "template": chat, "commit_message": "new"}},
    ]


@pytest.mark.parametrize(
    ("method", "path", "given", "named"),
    [
        ("GET", "", {"search": "a'b"}, "search"),
        ("GET", "", {"limit": "0"}, "limit"),
        ("GET", "", {"limit": "201"}, "limit"),
        ("GET", "", {"limit": "x"}, "limit"),
        ("GET", "", {"order": "x"}, "order"),
        ("GET", "/greeting", {"version": "1; drop"}, "version"),
        ("GET", "/gree ting", {}, "name"),
        ("GET", "/@x", {}, "name"),
        ("POST", "", {}, "name"),
        ("POST", "", {"name": "a"}, "template"),
        ("POST", "", {"name": "a b", "template": "x"}, "name"),
        ("POST", "", {"name": "a", "template": ""}, "template"),
        ("POST", "", {"name": "a", "template": []}, "template"),
        ("POST", "", {"name": "a", "template": 7}, "template"),
        ("POST", "", {"name": "a", "template": "x" * 50_001}, "template"),
        ("POST", "", {"name": "a", "template": [{"role": "user", "content": "x" * 49_999}]}, "template"),
        ("POST", "", {"name": "a", "template": [{"role": "x", "content": "y"}]}, "template[0].role"),
        ("POST", "", {"name": "a", "template": "x", "response_format": "json"}, "response_format"),
        ("POST", "", {"name": "a", "template": "x", "tags": {}}, "tags"),
    ],
)
def test_bad_values_are_refused_by_name(
    client: FlaskClient, registry: Registry, method: str, path: str, given: dict[str, Any], named: str
) -> None:
    """A value that the registry could not take is refused by its name, before MLflow is asked."""
    sent: dict[str, Any] = {"query_string": given} if method == "GET" else {"json": given}
    answer = client.open(f"{PROMPTS}{path}", method=method, **sent)
    assert (answer.status_code, answer.json["message"].startswith(named)) == (400, True), answer.json
    assert registry.asked == []


def test_scopes(make: Callable[..., WorkerState], registry: Registry, store: Store) -> None:
    """``invoke`` reads, ``manage`` also saves, ``usage`` alone does neither; who manages learns why it is down."""
    keys = Keys(store)
    client = create_app(make(prompts=PromptRegistry(ask=registry), keys=keys)).test_client()
    bearer = {
        scope: {"Authorization": f"Bearer {keys.create('acme', scopes=(scope,))[0]}"}
        for scope in ("invoke", "usage", "manage")
    }
    new = {"name": "a", "template": "b"}
    found = {
        scope: (
            client.get(PROMPTS, headers=headers).status_code,
            client.post(PROMPTS, json=new, headers=headers).status_code,
        )
        for scope, headers in bearer.items()
    }
    assert found == {"invoke": (200, 403), "usage": (403, 403), "manage": (found["manage"][0], 200)}
    registry.answer = {"error": "nothing at sqlite:///secret-place.db", "kind": "unavailable"}
    down = client.get(PROMPTS, headers=bearer["invoke"])
    assert (down.status_code, "secret-place" in down.text, int(down.headers["Retry-After"])) == (503, False, 5)
    assert "secret-place" in client.post(PROMPTS, json=new, headers=bearer["manage"]).text
