"""Further uses of a running server by clients: another base URL, MLflow's evaluation, LiteLLM's exceptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llm_server import WARNINGS_OF_CLIENTS
from stores import empty_store, own_stores

pytestmark = WARNINGS_OF_CLIENTS
QUESTION = "What is the capital of France?"
GREEDY = {"max_tokens": 16, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": QUESTION}], **GREEDY}


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a store for the traces that MLflow's evaluation writes."""
    import mlflow

    with own_stores(empty_store(tmp_path)):
        yield
        mlflow.flush_trace_async_logging(terminate=True)


def test_openai_of_a_workspace(url: str) -> None:
    """openai with a workspace's base URL gets the answers of ``/v1``, streamed or not, for every task."""
    import openai

    with (
        openai.OpenAI(base_url=f"{url}/serving-endpoints", api_key="x") as client,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as other,
    ):
        whole = client.chat.completions.create(model="assistant", **CHAT)
        assert "Paris" in whole.choices[0].message.content
        chunks = list(client.chat.completions.create(model="assistant", stream=True, **CHAT))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        raw = {"extra_body": {"use_raw_prompt": True}}  # not the default of this route
        done = client.completions.create(model="assistant", prompt="One, two,", **GREEDY, **raw)
        assert (
            done.choices[0].text
            == other.completions.create(model="assistant", prompt="One, two,", **GREEDY).choices[0].text
        )
        mine, theirs = (c.embeddings.create(model="embedder", input=["a", "b"]).data for c in (client, other))
        assert np.allclose([v.embedding for v in mine], [v.embedding for v in theirs], atol=1e-6)
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.chat.completions.create(model="nobody", **CHAT)


def test_mlflow_to_predict_fn(workspace: str, traces: None) -> None:
    """``mlflow.genai.to_predict_fn`` queries an endpoint of a workspace for an evaluation."""
    import mlflow

    reply = mlflow.genai.to_predict_fn("endpoints:/assistant")(**CHAT)
    assert "Paris" in reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("target", ["databricks", "http"])
def test_mlflow_judges_by_an_endpoint(workspace: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``endpoints:/name`` serves as the model of MLflow's LLM metrics, with either kind of deployments target."""
    from mlflow.metrics.genai.model_utils import call_deployments_api, get_endpoint_type, score_model_on_payload

    monkeypatch.setenv("MLFLOW_DEPLOYMENTS_TARGET", workspace if target == "http" else target)
    monkeypatch.setattr("mlflow.deployments.utils._deployments_target", None)
    kind = get_endpoint_type("endpoints:/assistant")
    assert kind == "llm/v1/chat"
    assert "Paris" in score_model_on_payload("endpoints:/assistant", QUESTION, GREEDY, endpoint_type=kind)
    assert "Paris" in call_deployments_api("assistant", CHAT)["choices"][0]["message"]["content"]


def test_mlflow_judges_by_openai(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``openai:/name`` serves as that model, with ``OPENAI_API_BASE`` at the server."""
    from mlflow.metrics.genai.model_utils import score_model_on_payload

    monkeypatch.setenv("OPENAI_API_BASE", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    assert "Paris" in score_model_on_payload("openai:/assistant", QUESTION, GREEDY)


@pytest.mark.parametrize(("provider", "suffix"), [("openai", "/v1"), ("databricks", "/serving-endpoints")])
def test_litellm_exceptions(url: str, provider: str, suffix: str) -> None:
    """litellm raises different exceptions for an unknown endpoint and a prompt that is too long."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    call = {"api_base": url + suffix, "api_key": "x", "max_tokens": 4, "num_retries": 0}
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(model=f"{provider}/nobody", messages=CHAT["messages"], **call)
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError, match="context length"):
        litellm.completion(model=f"{provider}/assistant", messages=long, **call)
