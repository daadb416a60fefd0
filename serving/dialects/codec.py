"""The codec of the dialects that speak in OpenAI's objects; each brings its tables, its style and its form of error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ServingError
from ..reply import Reply
from ..request import RawRequest, Task, ValidRequest
from . import wire
from .base import ErrorBody, StreamEncoder
from .decode import decode
from .errors import openai_error, retry_headers
from .fields import Table


class ObjectDialect:
    """A pure codec; one object serves every request."""

    name: str
    tables: ClassVar[Mapping[str, Table]]
    style: wire.Style

    def decode(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        return decode(self.tables, body, task)

    def encode(self, request: ValidRequest, reply: Reply) -> dict[str, Any]:
        return wire.reply(request, reply, self.style)

    def stream(self, request: ValidRequest) -> StreamEncoder:
        return wire.Stream(request, self.style, self.streamed_error)

    def error(self, error: ServingError) -> ErrorBody:
        return ErrorBody(status=error.status, body=self.error_body(error), headers=retry_headers(error))

    def error_body(self, error: ServingError) -> dict[str, Any]:
        raise NotImplementedError

    def streamed_error(self, error: ServingError) -> dict[str, Any]:
        """What a stream that has begun says of an error, before its ``[DONE]``."""
        return self.error_body(error)


class CodedErrorDialect(ObjectDialect):
    """Errors are ``{"error_code", "message"}``; ``error_codes`` has the code of each kind.

    Within a stream OpenAI's ``error`` stands beside them: its clients, which these routes have too, take an event
    without that key for one more chunk, and a stream that broke off for a whole one.
    """

    error_codes: ClassVar[Mapping[str, str]]

    def error_body(self, error: ServingError) -> dict[str, Any]:
        return {"error_code": self.error_codes[error.kind], "message": error.message}

    def streamed_error(self, error: ServingError) -> dict[str, Any]:
        return openai_error(error) | self.error_body(error)
