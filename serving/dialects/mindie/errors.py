"""Errors as MindIE's services send them: ``{"error", "error_type"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError

# kind -> error_type
ERROR_TYPES: Mapping[str, str] = {
    "internal": "Internal Error",
    "bad_request": "Input Validation Error",
    "invalid_field": "Input Validation Error",
    "context_too_long": "Input Validation Error",
    "unauthenticated": "Unauthorized",
    "permission_denied": "Forbidden",
    "not_found": "NotFoundError",
    "method_not_allowed": "Method Not Allowed",
    "already_exists": "Conflict",
    "conflict": "Conflict",
    "payload_too_large": "Payload Too Large",
    "ends_engines": "Input Validation Error",
    "limit_exceeded": "Too Many Requests",
    "unavailable": "Overloaded",
    "overloaded": "Overloaded",
    "shutting_down": "Overloaded",
    "engine_died": "Overloaded",
    "deadline_exceeded": "Request Timeout",
    "aborted": "Request Aborted",
}

ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": "string"}, "error_type": {"enum": sorted(set(ERROR_TYPES.values()))}},
}


def error_body(error: ServingError) -> dict[str, Any]:
    """Return the object of an error, as in ``ERROR_SCHEMA``."""
    return {"error": error.message, "error_type": ERROR_TYPES[error.kind]}
