"""The fields of a request in the log and the metrics: enough to find it again, nothing of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.errors import InvalidField, from_kind
from mlflow_llm.serving.metering import Keys, Store
from mlflow_llm.serving.observability import metrics
from mlflow_llm.serving.system import logs

SECRET = "my number is 078-05-1120"
CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the events that are logged."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(logs, "event", lambda name, **fields: lines.append({"event": name, **fields}))
    return lines


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path}/serving.db")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [SECRET]}]}),
        ("/v1/chat/completions", CHAT | {"messages": SECRET}),
        ("/v1/chat/completions", CHAT | {"stop": {"a": SECRET}}),
        ("/v1/completions", {"model": "assistant", "prompt": [SECRET, 5]}),
        ("/v1/embeddings", {"model": "assistant", "input": {"text": SECRET}}),
    ],
)
def test_refused_values_are_for_the_caller(
    client: FlaskClient, lines: list[dict[str, Any]], path: str, body: object
) -> None:
    """The answer shows the value that was refused; the log has the field and what is allowed."""
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    (line,) = lines
    assert line["status"] == 400
    assert answer.json["error"]["param"] in line["error"]
    assert SECRET not in str(line)


def test_numbers_and_faults_of_engines_are_logged_with_their_field() -> None:
    """A number identifies no caller, and what came over from an engine has no value any more."""
    assert InvalidField("temperature", 9, "a number in [0, 2]").logged == (
        "temperature: 9 is not allowed; expected a number in [0, 2]"
    )
    assert from_kind("invalid_field", f"prompt: {SECRET}", param="prompt").logged == "prompt: not allowed"


def test_an_unknown_adapter_becomes_no_label(
    client: FlaskClient, lines: list[dict[str, Any]], server: WorkerState
) -> None:
    """An adapter that a caller makes up is answered, and neither counted under its name nor kept in the log."""
    name = "made-up-" + "x" * 1000
    assert client.post("/invocations", json=CHAT | {"adapter": name}).status_code == 404
    assert name not in metrics.exposition(server.endpoints).decode()
    assert "adapter" not in {key for key, value in lines[0].items() if value}


def test_every_answer_but_those_open_to_all_has_a_line(
    make: Callable[..., WorkerState], store: Store, lines: list[dict[str, Any]]
) -> None:
    """Lists and refusals are logged like requests, with the key that asked; public probes and the docs are not."""
    keys = Keys(store)
    secret, key = keys.create("team")
    client = create_app(make(keys=keys)).test_client()
    for path in ("/health", "/ready", "/docs"):
        client.get(path)
    assert lines == []
    headers = {"Authorization": f"Bearer {secret}", "X-Request-Id": "audit-1"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    (line,) = lines
    found = {name: line[name] for name in ("event", "request_id", "method", "path", "status", "key")}
    assert found == {
        "event": "request",
        "request_id": "audit-1",
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
        "key": key.key_id,
    }
