"""The values of the lists and probes, and the name by which a reply calls its model."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from flask.testing import FlaskClient

CARD = {"object": "model", "created": 1, "owned_by": "mlflow-llm", "root": "model-1", "max_model_len": 4096}
CARD["served_models"] = [{"name": "model-1"}]
BASE = {"id": "assistant", **CARD}
ADAPTED = {"id": "assistant:pirate", **CARD, "parent": "assistant"}
ENTRY = {
    "name": "assistant",
    "endpoint_type": "llm/v1/chat",
    "model": {"name": "model-1", "provider": "mlflow-llm"},
    "endpoint_url": "/endpoints/assistant/invocations",
    "limit": None,
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models", {"object": "list", "data": [BASE, ADAPTED]}),
        ("/v1/models/assistant", BASE),
        ("/v1/models/assistant:pirate", ADAPTED),
        ("/api/2.0/endpoints/", {"endpoints": [ENTRY], "next_page_token": None}),
        ("/api/2.0/endpoints/assistant", ENTRY),
        ("/.well-known/databricks-config", {}),
    ],
)
def test_lists(client: FlaskClient, path: str, expected: dict) -> None:
    """The lists of endpoints have exactly the expected fields and values."""
    answer = client.get(path)
    assert (answer.status_code, answer.content_type) == (200, "application/json")
    assert answer.json == expected


@pytest.mark.parametrize(("path", "text"), [("/ping", "\n"), ("/version", version("mlflow"))])
def test_probes(client: FlaskClient, path: str, text: str) -> None:
    """The probe paths answer the same text as MLflow's scoring server."""
    answer = client.get(path)
    assert (answer.status_code, answer.mimetype, answer.text) == (200, "text/plain", text)


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"prompt": "Hi", "max_tokens": 4}
NAMED = "assistant:pirate"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"model": NAMED}),
        ("/v1/completions", TEXT | {"model": NAMED}),
        ("/v1/embeddings", {"input": "Hi", "model": NAMED}),
        ("/serving-endpoints/chat/completions", CHAT | {"model": NAMED}),
        ("/serving-endpoints/assistant/invocations", CHAT | {"model": NAMED}),
        (f"/serving-endpoints/{NAMED}/invocations", TEXT),
        ("/endpoints/assistant/invocations", CHAT | {"adapter": "pirate"}),
        ("/endpoints/assistant/invocations", {"input": "Hi", "adapter": "pirate"}),
        ("/invocations", TEXT | {"model": "model-1", "adapter": "pirate"}),
    ],
)
def test_a_reply_names_its_adapter(client: FlaskClient, path: str, body: dict) -> None:
    """``model`` in the reply, whole and streamed, is the endpoint's name with the adapter's, as it is listed."""
    assert client.post(path, json=body).json["model"] == NAMED
    if "input" not in body:
        *events, done = client.post(path, json=body | {"stream": True}).text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert {json.loads(event[6:])["model"] for event in events} == {NAMED}


def test_a_reply_of_the_base_names_the_endpoint(client: FlaskClient) -> None:
    """A reply of the base model names the endpoint, whatever name the request used."""
    for model in ("assistant", "model-1"):
        assert client.post("/v1/chat/completions", json=CHAT | {"model": model}).json["model"] == "assistant"
