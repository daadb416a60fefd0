"""The rendering of errors that the dialects share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..interface.errors import LimitExceeded, ServingError

MAX_RETRY_AFTER = 60  # seconds: clients of OpenAI and Anthropic wait no longer than this before they ask again
SLOT_SECONDS = 1  # second by which a minute window is longer than a minute

# kind -> (type, code); clients pick their exception by status and read these for details
OPENAI_ERRORS: dict[str, tuple[str, str | None]] = {
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
    "ends_engines": ("invalid_request_error", "ends_engines"),
    "limit_exceeded": ("rate_limit_error", "rate_limit_exceeded"),
    "unavailable": ("server_error", "unavailable"),
    "overloaded": ("server_error", "overloaded"),
    "shutting_down": ("server_error", "shutting_down"),
    "engine_died": ("server_error", "engine_died"),
    "deadline_exceeded": ("server_error", "timeout"),
    "aborted": ("invalid_request_error", "request_aborted"),
}

OPENAI_ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
CODED_ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error_code", "message"],
    "properties": {
        "error_code": {"type": "string"},
        "message": {"type": "string"},
        "error": OPENAI_ERROR_SCHEMA["properties"]["error"] | {"description": "in a stream alone"},
    },
}


def retry_headers(error: ServingError) -> dict[str, str]:
    """Return ``Retry-After`` in whole seconds, rounded up, because a client that waits less comes back too early.

    For a limit that ``is_exhausted`` it is the true wait, and ``x-should-retry`` tells OpenAI's and Anthropic's clients
    to raise at once: they would take a longer wait than ``MAX_RETRY_AFTER`` for none, and ask again within seconds.
    Everything else may be over sooner, and is asked for again after at most ``MAX_RETRY_AFTER``.
    """
    if error.retry_after is None:
        return {}
    after = max(1, math.ceil(error.retry_after))
    if is_exhausted(error):
        return {"Retry-After": str(after), "x-should-retry": "false"}
    return {"Retry-After": str(min(MAX_RETRY_AFTER, after))}


def is_exhausted(error: ServingError) -> bool:
    """Return whether ``error`` is a limit of more than a minute that stays reached for longer than clients wait."""
    after = error.retry_after
    return isinstance(error, LimitExceeded) and after is not None and after > MAX_RETRY_AFTER + SLOT_SECONDS


def openai_error(error: ServingError) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``.

    By this key OpenAI's clients recognise an error within a stream.
    """
    kind, code = OPENAI_ERRORS[error.kind]
    if isinstance(error, LimitExceeded) and error.is_budget:
        kind = code = "insufficient_quota"
    if error.kind == "not_found" and error.param == "model":
        code = "model_not_found"  # OpenAI's code, by which LiteLLM recognises the error
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
