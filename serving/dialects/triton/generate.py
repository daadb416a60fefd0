"""Triton's ``generate`` and ``generate_stream`` as MindIE's server has them.

Source of the format: the document of MindIE Server's inference interface ``/v2/models/{model}/generate_stream``. An
error is ``{"error", "error_type"}``. ``triton_generate`` has the form that Triton itself accepts at these paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...interface.errors import UNPROCESSABLE, RequestError, ServingError
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import retry_headers
from ..json_body import json_bytes, read_object
from ..mindie.errors import ERROR_SCHEMA
from .replies import Stream, error_of
from .replies import reply as whole_reply
from .reply_types import STREAMED, WHOLE
from .requests import body_schema, read_generate

MODEL, VERSIONED = "/v2/models/<name>", "/v2/models/<name>/versions/<model_version>"


class GenerateDialect:
    """A pure codec; one object serves every request."""

    name = "generate"
    routes = tuple(
        InferenceRoute(f"{place}/{verb}", "completions", f"A text after text_input, {how}")
        for verb, how in (("generate", "whole"), ("generate_stream", "streamed"))
        for place in (MODEL, VERSIONED)
    )
    prefixes: tuple[str, ...] = ()
    request_id_header: str | None = None
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"completions": body_schema()}
    error_schema: Mapping[str, Any] = {**ERROR_SCHEMA, "required": ["error"]}  # Triton's form has no error_type

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"completions": STREAMED if streams(route) else WHOLE}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        version, stream = head.path.get("model_version"), streams(head.route)
        return read_object(body, lambda found: read_generate(found, version=version, stream=stream))

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(whole_reply(request, reply, echoed)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return Stream(request, echoed)

    def error(self, error: ServingError) -> Encoded:
        is_invalid = isinstance(error, RequestError) and error.status == RequestError.status
        status = UNPROCESSABLE if is_invalid else error.status
        return Encoded(status=status, body=json.dumps(error_of(error)).encode(), headers=retry_headers(error))


def streams(route: InferenceRoute) -> bool:
    """Return whether a route streams its replies."""
    return route.path.endswith("_stream")
