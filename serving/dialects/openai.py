"""OpenAI's API: chat completions, completions and embeddings.

Source of the format: the API reference of ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``.
Sampling fields that vLLM and MindIE clients add are accepted (``tables.EXTENSIONS``). An error is
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import Any

from ..errors import ServingError
from . import wire
from .codec import ObjectDialect
from .tables import OPENAI

# kind -> (type, code); clients pick their exception by status and read these for details
ERRORS: dict[str, tuple[str, str | None]] = {
    "internal": ("server_error", None),
    "bad_request": ("invalid_request_error", None),
    "invalid_field": ("invalid_request_error", "invalid_value"),
    "context_too_long": ("invalid_request_error", "context_length_exceeded"),
    "unauthenticated": ("authentication_error", "invalid_api_key"),
    "permission_denied": ("permission_error", "permission_denied"),
    "not_found": ("invalid_request_error", "not_found"),
    "method_not_allowed": ("invalid_request_error", "method_not_allowed"),
    "already_exists": ("invalid_request_error", "already_exists"),
    "conflict": ("invalid_request_error", "conflict"),
    "payload_too_large": ("invalid_request_error", "request_too_large"),
    "limit_exceeded": ("rate_limit_error", "rate_limit_exceeded"),
    "unavailable": ("server_error", "unavailable"),
    "overloaded": ("server_error", "overloaded"),
    "shutting_down": ("server_error", "shutting_down"),
    "engine_died": ("server_error", "engine_died"),
    "deadline_exceeded": ("server_error", "timeout"),
    "aborted": ("invalid_request_error", "request_aborted"),
}


class OpenAIDialect(ObjectDialect):
    name = "openai"
    tables = OPENAI
    style = wire.Style()

    def error_body(self, error: ServingError) -> dict[str, Any]:
        kind, code = ERRORS[error.kind]
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
