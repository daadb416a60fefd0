"""OpenVINO Model Server's routes through the whole application."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

CHAT = {
    "model": "assistant",
    "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "hello"}],
    "max_tokens": 5,
    "stream": False,
}


def test_the_documents_example(client: FlaskClient) -> None:
    """The documented example is answered in the documented shape, greedily, so that it is the same again."""
    first, again = (client.post("/v3/chat/completions", json=CHAT).json for _ in range(2))
    assert first["choices"] == again["choices"]
    (choice,) = first["choices"]
    assert set(choice) == {"finish_reason", "index", "logprobs", "message"}
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    assert set(choice["message"]) == {"content", "role"}
    assert (first["model"], first["object"]) == ("assistant", "chat.completion")
    assert first["usage"]["completion_tokens"] == 5


def test_streams_and_other_tasks(client: FlaskClient) -> None:
    """Chunks end with [DONE] and join to the whole; completions and embeddings answer as OpenAI's do."""
    whole = client.post("/v3/chat/completions", json=CHAT).json["choices"][0]["message"]["content"]
    streamed = client.post("/v3/chat/completions", json=CHAT | {"stream": True}).text.split("\n\n")
    assert streamed[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event[6:]) for event in streamed[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    text = client.post("/v3/completions", json={"model": "assistant", "prompt": "a", "max_tokens": 3}).json
    assert (text["object"], text["usage"]["completion_tokens"]) == ("text_completion", 3)
    vectors = client.post("/v3/embeddings", json={"model": "assistant", "input": ["a", "b"]}).json
    assert len(vectors["data"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v3/chat/completions", {**CHAT, "model": "nobody"}, 404, "nobody"),
        ("/v3/chat/completions", {**CHAT, "n": 2}, 400, "n: 2 is not allowed; expected an integer in [1, best_of (1)]"),
        ("/v3/chat/completions", {**CHAT, "best_of": 2}, 400, "beam search"),  # which the instant engine does not have
        ("/v3/chat/completions", {"messages": CHAT["messages"]}, 400, "model"),
        ("/v3/nothing", {}, 404, "no route"),
    ],
)
def test_errors(client: FlaskClient, path: str, body: dict[str, Any], status: int, said: str) -> None:
    """An error is ``{"error": "..."}`` and nothing else, also for unknown routes."""
    answer = client.post(path, json=body)
    assert (answer.status_code, list(answer.json)) == (status, ["error"])
    assert said in answer.json["error"]


def test_ignore_eos_takes_what_the_context_leaves(client: FlaskClient) -> None:
    """ignore_eos without max_tokens uses at most the rest of the context instead of refusing a long prompt."""
    prompt = "a" * 4090  # of a context of 4096
    answer = client.post("/v3/completions", json={"model": "assistant", "prompt": prompt, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json["usage"]["completion_tokens"] == 6
    body = {"model": "assistant", "prompt": "a", "ignore_eos": True}
    assert client.post("/v3/completions", json=body).json["usage"]["completion_tokens"] == 4000


def test_lists_and_states(client: FlaskClient) -> None:
    """Models are listed and shown as OpenAI's API has them, and their states as TensorFlow Serving's."""
    assert client.get("/v3/models").json == client.get("/v1/models").json
    assert client.get("/v3/models/assistant").json["id"] == "assistant"
    assert list(client.get("/v3/models/nobody").json) == ["error"]
    fine = {"error_code": "OK", "error_message": "OK"}
    (state,) = client.get("/v1/config").json["assistant"]["model_version_status"]
    assert state == {"version": "1", "state": "AVAILABLE", "status": fine}
    assert client.get("/v2/models/assistant/ready").status_code == 200
    assert client.get("/v2/models/nobody/ready").status_code == 404
    assert client.post("/v1/config/reload").status_code in (404, 405)
