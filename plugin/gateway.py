"""Provider ``llm`` for MLflow's AI Gateway: serve an endpoint of this server as a gateway model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from mlflow.gateway.config import ConfigModel
from mlflow.gateway.providers import openai_compatible
from mlflow.gateway.providers.openai_compatible import OpenAICompatibleProvider
from mlflow.gateway.schemas import completions


class LlmConfig(ConfigModel):
    """Configuration of the provider: ``api_base`` ends in ``/v1``; ``api_key`` is optional if the server needs none."""

    api_key: str = "none"
    api_base: str | None = None


class LlmProvider(OpenAICompatibleProvider):
    """Entry point ``llm`` of ``mlflow.gateway.providers``: chat and embeddings are inherited, completions are added."""

    DISPLAY_NAME = "mlflow-llm"
    CONFIG_TYPE = LlmConfig
    DEFAULT_API_BASE = "http://127.0.0.1:8000/v1"

    async def _completions(self, payload: completions.RequestPayload) -> completions.ResponsePayload:
        call = self._completions_call(payload)
        return completions.ResponsePayload.model_validate(await openai_compatible.send_request(**call))

    async def _completions_stream(
        self, payload: completions.RequestPayload
    ) -> AsyncIterator[completions.StreamResponsePayload]:
        call = self._completions_call(payload, stream_options={"include_usage": True})
        async for chunk in openai_compatible.stream_sse_data(openai_compatible.send_stream_request(**call)):
            yield completions.StreamResponsePayload.model_validate(chunk | {"object": "text_completion_chunk"})

    def _completions_call(self, payload: completions.RequestPayload, **more: Any) -> dict[str, Any]:
        """Build what the base class's methods send, for the route ``completions``, with the configured model as the
        default."""
        asked = payload.model_dump(exclude_none=True)
        self.check_for_model_field(asked)
        body = {"model": self.config.model.name, **more, **asked}
        return {"headers": self.headers, "base_url": self._api_base, "path": "completions", "payload": body}
