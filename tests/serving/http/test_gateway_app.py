"""MLflow's AI Gateway, configured by a file, in front of a real server of ours through the provider ``llm``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_process import Running

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CONFIG = """
endpoints:
  - name: {kind}
    endpoint_type: llm/v1/{kind}
    model:
      provider: llm
      name: assistant
      config:
        api_base: {url}/v1
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(observed: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Return a client of the gateway's application, whose endpoints ``chat``, ``completions`` and ``embeddings`` are
    ours.
    """
    from mlflow.gateway.app import create_app_from_path
    from starlette.testclient import TestClient

    path: Path = tmp_path_factory.mktemp("gateway") / "config.yaml"
    parts = [CONFIG.format(kind=kind, url=observed.url) for kind in ("chat", "completions", "embeddings")]
    path.write_text(parts[0] + "".join(part.replace("\nendpoints:", "") for part in parts[1:]))
    with TestClient(create_app_from_path(path)) as client:
        yield client


def direct(server: Running, path: str, body: dict) -> dict:
    from mlflow_llm.serving.cli.http import Client

    return Client(server.url).post(path, {"model": "assistant", **body})


def test_chat(gateway: object, observed: Running) -> None:
    """A chat through the gateway is the chat our server gives, with its usage."""
    answer = gateway.post("/gateway/chat/invocations", json=CHAT)
    assert answer.status_code == 200, answer.text
    reported, expected = answer.json(), direct(observed, "/v1/chat/completions", CHAT)
    assert reported["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert reported["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reported["usage"][name] == expected["usage"][name]


def test_chat_in_openais_form(gateway: object, observed: Running) -> None:
    """The gateway's own OpenAI route reaches us too, the endpoint named by ``model``."""
    answer = gateway.post("/v1/chat/completions", json=CHAT | {"model": "chat"})
    expected = direct(observed, "/v1/chat/completions", CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]


def deltas(text: str) -> list[dict]:
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def test_chat_streamed(gateway: object, observed: Running) -> None:
    """A stream through the gateway joins to the same text and ends with the same reason."""
    answer = gateway.post("/gateway/chat/invocations", json=CHAT | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = deltas(answer.text)
    expected = direct(observed, "/v1/chat/completions", CHAT)["choices"][0]
    assert "".join(choice["delta"].get("content") or "" for choice in found) == expected["message"]["content"]
    assert found[-1]["finish_reason"] == expected["finish_reason"]


def test_completions(gateway: object, observed: Running) -> None:
    """Completions through the gateway work whole and streamed."""
    body = {"prompt": "One", "max_tokens": 6, "temperature": 0}
    expected = direct(observed, "/v1/completions", body)["choices"][0]["text"]
    assert gateway.post("/gateway/completions/invocations", json=body).json()["choices"][0]["text"] == expected
    streamed = gateway.post("/gateway/completions/invocations", json=body | {"stream": True})
    parts = [choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in deltas(streamed.text)]
    assert "".join(parts) == expected


def test_embeddings(gateway: object, observed: Running) -> None:
    """Embeddings through the gateway work for one text and several, with usage."""
    for given in ("a", ["a", "bc"]):
        reported = gateway.post("/gateway/embeddings/invocations", json={"input": given}).json()
        expected = direct(observed, "/v1/embeddings", {"input": given})
        assert [entry["embedding"] for entry in reported["data"]] == [entry["embedding"] for entry in expected["data"]]
        assert reported["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_refusal_keeps_status_and_words(gateway: object) -> None:
    """The gateway passes on the status and message of our server's refusal."""
    answer = gateway.post("/gateway/chat/invocations", json=CHAT | {"temperature": 1.5, "max_tokens": 999_999})
    assert answer.status_code == 400, answer.text
    assert "max_tokens" in answer.text
