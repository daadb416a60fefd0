"""The codec of the dialects that use OpenAI's JSON objects. Each has its own tables, style and form of error."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ...interface.errors import LimitExceeded, PermissionDenied, ServingError
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import CODED_ERROR_SCHEMA, is_exhausted, openai_error, retry_headers
from ..fields.decode import decode
from ..fields.fields import Table
from ..json_body import json_bytes, read_object
from . import replies
from .reply_types import EXCHANGES


class ObjectDialect:
    """A pure codec; one object serves every request. ``read`` and ``written`` are ``decode`` and ``encode`` with Python
    objects instead of bytes, for callers in this process."""

    name: str
    routes: tuple[InferenceRoute, ...]
    prefixes: tuple[str, ...] = ()
    request_id_header: str | None = None
    tables: ClassVar[Mapping[Task, Table]]
    forms: ClassVar[Mapping[Task, Exchange]] = EXCHANGES
    style: replies.Style
    error_schema: Mapping[str, Any]

    @functools.cached_property
    def request_schemas(self) -> Mapping[Task, Mapping[str, Any]]:
        return {task: table.schema() for task, table in self.tables.items()}

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {task: self.forms[task] for task in (self.tables if route.task is None else (route.task,))}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        return read_object(body, lambda found: self.read(found, head.route.task))

    def read(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        """Read a body. If ``task`` is None, it follows from the body. Raises ``InvalidField``."""
        return decode(self.tables, body, task)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(self.written(request, reply)))

    def written(self, request: ValidRequest, reply: Reply) -> dict[str, Any]:
        """Return the object that ``encode`` writes as JSON."""
        return {**replies.reply(request, reply, self.style), **replies.databricks_output(reply.trace)}

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return replies.Stream(request, self.style, self.streamed_error)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps(self.error_body(error), ensure_ascii=True).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))

    def error_body(self, error: ServingError) -> dict[str, Any]:
        """Return the object of an error, as in ``error_schema``."""
        raise NotImplementedError

    def streamed_error(self, error: ServingError) -> dict[str, Any]:
        """Return the object of an error in a stream that has begun; ``[DONE]`` follows it."""
        return self.error_body(error)


class CodedErrorDialect(ObjectDialect):
    """A dialect whose errors are ``{"error_code", "message"}``; ``error_codes`` has the code of each kind.

    In a stream OpenAI's ``error`` is added: OpenAI's clients, which use these routes too, take an event without that
    key for one more chunk, and so would take a stream that broke off for a complete one.
    """

    error_codes: ClassVar[Mapping[str, str]]
    error_schema = CODED_ERROR_SCHEMA

    def error(self, error: ServingError) -> Encoded:
        """Encode an error. A budget that stays spent is refused for good: Databricks' and MLflow's clients repeat every
        429 for minutes, and sleep for as long as ``Retry-After`` says, which may be days."""
        if isinstance(error, LimitExceeded) and error.is_budget and is_exhausted(error):
            return super().error(PermissionDenied(error.message))
        return super().error(error)

    def error_body(self, error: ServingError) -> dict[str, Any]:
        return {"error_code": self.error_codes[error.kind], "message": error.message}

    def streamed_error(self, error: ServingError) -> dict[str, Any]:
        return openai_error(error) | self.error_body(error)
