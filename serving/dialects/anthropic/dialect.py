"""Anthropic's Messages API.

Source of the format: the API reference of ``/v1/messages``. Bodies are read by ``anthropic_requests``, replies written
by ``anthropic_replies``. An error is ``{"type": "error", "error": {"type", "message"}}``. The route
``/v1/messages/count_tokens``, which counts tokens without generating a reply, is in ``http.inference.token_counts``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ContextTooLong, ServingError
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import retry_headers
from ..json_body import json_bytes, read_object
from .replies import Stream, message
from .reply_types import MESSAGE
from .requests import BODY, check_headers, read_message_request

# kind -> type; clients pick their exception by status
ERROR_TYPES: Mapping[str, str] = {
    "internal": "api_error",
    "bad_request": "invalid_request_error",
    "invalid_field": "invalid_request_error",
    "context_too_long": "invalid_request_error",
    "unauthenticated": "authentication_error",
    "permission_denied": "permission_error",
    "not_found": "not_found_error",
    "method_not_allowed": "invalid_request_error",
    "already_exists": "conflict_error",
    "conflict": "conflict_error",
    "payload_too_large": "request_too_large",
    "ends_engines": "invalid_request_error",
    "limit_exceeded": "rate_limit_error",
    "unavailable": "overloaded_error",
    "overloaded": "overloaded_error",
    "shutting_down": "overloaded_error",
    "engine_died": "overloaded_error",
    "deadline_exceeded": "timeout_error",
    "aborted": "invalid_request_error",
}
# Fields whose refusal clients recognise by a code: the tool runner then sends whole conversations
_DETAILS = {"thread": "thread_unsupported_request"}
# Beginnings of error messages with the field names used below the dialects, and the names of this API
_NAMES = (
    (re.compile(r"stop(?=[:\[])"), "stop_sequences"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function\."), r"\1."),
    (re.compile(r"parallel_tool_calls: False"), "tool_choice.disable_parallel_tool_use: True"),
)


class AnthropicDialect:
    """A pure codec; one object serves every request."""

    name = "anthropic"
    routes = (InferenceRoute("/v1/messages", "chat", "Message"),)
    prefixes = ("/v1/messages",)
    request_id_header = "request-id"
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"chat": BODY.schema}
    error_schema: Mapping[str, Any] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
                },
            },
        },
    }

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"chat": MESSAGE}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        check_headers(head.headers)
        return read_object(body, read_message_request)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(message(request, reply)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return Stream(request, error_body)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps(error_body(error), ensure_ascii=True).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))


def error_body(error: ServingError) -> dict[str, Any]:
    """Return the object of an error, as in ``error_schema``."""
    found: dict[str, Any] = {"type": ERROR_TYPES[error.kind], "message": _message(error)}
    if error.param in _DETAILS:
        found["details"] = {"error_code": _DETAILS[error.param]}
    return {"type": "error", "error": found}


def _message(error: ServingError) -> str:
    """Return the error's message; if it begins with an internal name of a field, with the name that the caller sent.

    Agents recognise a prompt that is too long by the words added here, and shorten it.
    """
    if isinstance(error, ContextTooLong):
        return f"prompt is too long: {error.message}"
    if error.param is None or not error.message.startswith(error.param):
        return error.message
    for pattern, name in _NAMES:
        if pattern.match(error.message):
            return pattern.sub(name, error.message, count=1)
    return error.message
