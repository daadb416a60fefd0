"""The interface of a dialect to the server: headers and bytes in and out, and the error form of each path."""

from __future__ import annotations

import json

import pytest

from mlflow_llm.serving.dialects import DIALECTS, Head, InferenceRoute, dialect_of
from mlflow_llm.serving.interface.errors import InvalidField, RequestError

CHAT = InferenceRoute("/v1/chat/completions", "chat", "")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "openai"),
        ("/v1/chat/completions/", "openai"),
        ("/v1/nothing", "openai"),
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messages/batches", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1", "openai"),
        ("/v12", "mlflow"),
        ("/serving-endpoints/a/invocations", "databricks"),
        ("/serving-endpoints", "databricks"),
        ("/api/2.0/serving-endpoints/a/config", "databricks"),
        ("/api/2.0/mlflow-llm/keys", "mlflow"),
        ("/invocations", "mlflow"),
        ("/endpoints/a/invocations", "mlflow"),
        ("/", "mlflow"),
        ("", "mlflow"),
    ],
)
def test_error_dialect_of_a_path(path: str, name: str) -> None:
    """A path's errors are in the dialect of its route or prefix, and in MLflow's if neither is known."""
    assert dialect_of(path).name == name


def test_bytes_and_headers() -> None:
    """A body is decoded by its head and refused by name; an error is bytes with their type and headers."""
    codec = DIALECTS["openai"]
    raw = codec.decode(Head(CHAT, {}), b'{"messages":[{"role":"user","content":"hi"}]}')
    assert raw.task == "chat"
    for body, error in ((b"[]", InvalidField), (b"{", RequestError), (b'{"messages":[]}', InvalidField)):
        with pytest.raises(error):
            codec.decode(Head(CHAT, {}), body)
    refused = codec.error(RequestError("no", retry_after=2))
    assert (refused.status, refused.content_type, refused.headers) == (400, "application/json", {"Retry-After": "2"})
    assert json.loads(refused.body)["error"]["message"] == "no"
