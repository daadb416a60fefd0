"""Errors of the Responses API: OpenAI's object, with field names as the caller sent them."""

from __future__ import annotations

import re
from typing import Any

from ...interface.errors import ServingError
from ..errors import openai_error

# Field names used below the dialects, and their names here. Where the two do not mean exactly the same, the message has
# both names: for example, an item of ``input`` is not always one message.
_NAMES = (
    (re.compile(r"max_tokens$"), "max_output_tokens"),
    (re.compile(r"(tools\[\d+\]|tool_choice)\.(?:function|custom)\."), r"\1."),
    (re.compile(r"messages\b.*"), r"input (\g<0>)"),
    (re.compile(r"error_behavior$"), r"truncation (\g<0>)"),
    (re.compile(r"reasoning_effort$"), "reasoning.effort"),
)

# kind -> code; a response's error may have only a few codes
_FAILURES = {
    "bad_request": "invalid_prompt",
    "invalid_field": "invalid_prompt",
    "context_too_long": "invalid_prompt",
    "ends_engines": "invalid_prompt",
    "limit_exceeded": "rate_limit_exceeded",
}


def error_object(error: ServingError) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``."""
    found = openai_error(error)
    param = error.param
    if param is None or error.is_as_sent:
        return found
    said = found["error"]
    for pattern, name in _NAMES:
        if match := pattern.match(param):
            renamed = match.expand(name) + param[match.end() :]
            if error.message.startswith(param):
                said["message"] = renamed + error.message[len(param) :]
            said["param"] = renamed.partition(" (")[0]
            break
    return found


def failure(error: ServingError) -> dict[str, Any]:
    """Return the error of a response that has failed."""
    return {"code": _FAILURES.get(error.kind, "server_error"), "message": error_object(error)["error"]["message"]}
