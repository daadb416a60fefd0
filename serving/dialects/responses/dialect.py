"""OpenAI's Responses API, stateless: nothing is stored, so a conversation is sent with every request.

Bodies are read by ``responses_fields``, replies written by ``responses_replies`` and ``responses_stream``. An error is
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import OPENAI_ERROR_SCHEMA, retry_headers
from ..json_body import json_bytes, read_object
from .errors import error_object
from .fields import TABLE, read_response_request
from .replies import response
from .reply_types import RESPONSE
from .stream import ResponseStream


class ResponsesDialect:
    """A pure codec; one object serves every request."""

    name = "responses"
    routes = (InferenceRoute("/v1/responses", "chat", "Response"),)
    prefixes = ("/v1/responses",)
    request_id_header = None
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"chat": TABLE.schema()}
    error_schema = OPENAI_ERROR_SCHEMA

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"chat": RESPONSE}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        return read_object(body, read_response_request)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(response(request, reply, echoed)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return ResponseStream(request, echoed)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps(error_object(error), ensure_ascii=True).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))
