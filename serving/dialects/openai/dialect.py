"""OpenAI's API: chat completions, completions and embeddings.

Source of the format: the API reference of ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``.
Sampling fields that vLLM and MindIE clients add are accepted (``tables.EXTENSIONS``). An error is
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import Any

from ...interface.errors import ServingError
from ..base import InferenceRoute
from ..errors import OPENAI_ERROR_SCHEMA, openai_error
from ..fields.tables import OPENAI
from .codec import ObjectDialect
from .replies import Style


class OpenAIDialect(ObjectDialect):
    """OpenAI's routes below ``/v1``."""

    name = "openai"
    tables = OPENAI
    style = Style()
    routes = (
        InferenceRoute("/v1/chat/completions", "chat", "Chat completion"),
        InferenceRoute("/v1/completions", "completions", "Text completion"),
        InferenceRoute("/v1/embeddings", "embeddings", "Embeddings"),
        InferenceRoute("/v1/score", "score", "Score pairs of texts"),
        InferenceRoute("/score", "score", "Score pairs of texts"),
    )
    prefixes = ("/v1", "/tokenize", "/detokenize")
    error_schema = OPENAI_ERROR_SCHEMA

    def error_body(self, error: ServingError) -> dict[str, Any]:
        return openai_error(error)
