"""MLflow's AI Gateway provider ``llm``: an endpoint of this server behind the gateway."""

from __future__ import annotations

from mlflow.gateway.config import ConfigModel
from mlflow.gateway.providers.openai_compatible import OpenAICompatibleProvider


class LlmConfig(ConfigModel):
    """``api_base`` ends in ``/v1``; ``api_key`` may be left out where the server asks for none."""

    api_key: str = "none"
    api_base: str | None = None


class LlmProvider(OpenAICompatibleProvider):
    """Entry point ``llm`` of ``mlflow.gateway.providers``."""

    DISPLAY_NAME = "mlflow-llm"
    CONFIG_TYPE = LlmConfig
    DEFAULT_API_BASE = "http://127.0.0.1:8000/v1"
