"""OpenAI's Responses API, stateless: nothing is stored, so a conversation is sent with every request.

Bodies are read by ``responses_fields``, replies written by ``responses_replies`` and ``responses_stream``. An error is
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import ServingError
from ..reply import Reply
from ..request import RawRequest, Task, ValidRequest
from .base import Encoded, Head, InferenceRoute, StreamEncoder
from .errors import OPENAI_ERROR_SCHEMA, openai_error, retry_headers
from .json_body import json_bytes, read_object
from .responses_fields import TABLE, read_response_request
from .responses_replies import response
from .responses_stream import ResponseStream

# Fields that everything below the dialects knows by another name. Where that is not the same field under a name of
# its own, the message says both: one item of ``input`` is not one message.
_NAMES = (
    (re.compile(r"max_tokens$"), "max_output_tokens"),
    (re.compile(r"(tools\[\d+\]|tool_choice)\.function\."), r"\1."),
    (re.compile(r"messages\b.*"), r"input (\g<0>)"),
    (re.compile(r"error_behavior$"), r"truncation (\g<0>)"),
    (re.compile(r"thinking$"), r"reasoning.effort (\g<0>)"),
    (re.compile(r"chat_template_kwargs\.reasoning_effort$"), r"reasoning.effort (\g<0>)"),
)


class ResponsesDialect:
    """A pure codec; one object serves every request."""

    name = "responses"
    routes = (InferenceRoute("/v1/responses", "chat", "Response"),)
    prefixes = ("/v1/responses",)
    request_id_header = None
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"chat": TABLE.schema()}
    error_schema = OPENAI_ERROR_SCHEMA

    def decode(self, head: Head, body: bytes) -> RawRequest:
        return read_object(body, read_response_request)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(response(request, reply.choices[0], reply.usage, echoed)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return ResponseStream(request, echoed)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps(_named(openai_error(error)), ensure_ascii=True).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """An error's object with the names of fields that the caller sent."""
    error = found["error"]
    param = error["param"]
    for pattern, name in _NAMES if param is not None else ():
        if match := pattern.match(param):
            renamed = match.expand(name) + param[match.end() :]
            if error["message"].startswith(param):
                error["message"] = renamed + error["message"][len(param) :]
            error["param"] = renamed.partition(" (")[0]
            break
    return found
