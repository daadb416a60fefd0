"""The provider of MLflow's AI Gateway: found by its entry point, and speaking OpenAI's dialect to our server."""

from __future__ import annotations

import pytest
from mlflow.gateway.config import EndpointConfig
from mlflow.gateway.schemas import chat

from mlflow_llm.plugin.gateway import LlmConfig, LlmProvider

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def endpoint(**config: str) -> EndpointConfig:
    model = {"provider": "llm", "name": "assistant", "config": config}
    return EndpointConfig(name="chat", endpoint_type="llm/v1/chat", model=model)


def test_registry_finds_the_provider() -> None:
    """MLflow's registry loads the provider by its entry point, and its config by the provider's name."""
    from mlflow.gateway.provider_registry import provider_registry

    assert provider_registry.get("llm") is LlmProvider
    assert isinstance(endpoint(api_base="http://host:1/v1").model.config, LlmConfig)


async def _chat(provider: LlmProvider) -> chat.ResponsePayload:
    message = chat.RequestMessage(role="user", content="Hi")
    return await provider.chat(chat.RequestPayload(messages=[message], max_tokens=5))


def test_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat is sent to ``<api_base>/chat/completions`` with the endpoint's model, the key and the caller's fields."""
    import asyncio

    from mlflow.gateway.providers import openai_compatible

    sent = []

    async def send(**call: object) -> dict[str, object]:
        sent.append(call)
        message = {"role": "assistant", "content": "Hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        reply = {"id": "x", "object": "chat.completion", "created": 1, "model": "assistant"}
        return reply | {"choices": [choice], "usage": usage}

    monkeypatch.setattr(openai_compatible, "send_request", send)
    provider = LlmProvider(endpoint(api_base="http://host:1/v1", api_key="sk-1"))
    reply = asyncio.run(_chat(provider))
    (call,) = sent
    assert f"{call['base_url']}/{call['path']}" == "http://host:1/v1/chat/completions"
    assert call["headers"] == {"Authorization": "Bearer sk-1"}
    assert call["payload"]["model"] == "assistant"
    assert call["payload"]["messages"] == [{"role": "user", "content": "Hi"}]
    assert call["payload"]["max_tokens"] == 5
    assert reply.choices[0].message.content == "Hello"
