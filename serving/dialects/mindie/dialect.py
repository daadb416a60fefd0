"""MindIE's chat completions.

Source of the format: the document of MindIE Server's inference interface ``/v1/chat/completions``. This dialect is
always used below ``/mindie``, and at OpenAI's own path if the endpoint or the server says so (``openAiSupport``:
``http.dialect_choice``). An error is ``{"error", "error_type"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import retry_headers
from ..json_body import json_bytes, read_object
from .errors import ERROR_SCHEMA, error_body
from .replies import Stream
from .replies import reply as whole_reply
from .reply_types import CHAT
from .requests import read_chat, request_schema

SHARED_PATH = "/v1/chat/completions"  # shared with OpenAI's dialect


class MindieDialect:
    """A pure codec; one object serves every request."""

    name = "mindie"
    routes = (InferenceRoute("/mindie/v1/chat/completions", "chat", "Chat completion as MindIE has it"),)
    prefixes = ("/mindie",)
    request_id_header: str | None = None
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"chat": request_schema()}
    error_schema: Mapping[str, Any] = ERROR_SCHEMA

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"chat": CHAT}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        return read_object(body, read_chat)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(whole_reply(request, reply)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return Stream(request)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps(error_body(error), ensure_ascii=True).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))
