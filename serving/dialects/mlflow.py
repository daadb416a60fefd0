"""MLflow's form: what ``predict`` of a logged model, the scoring server and the deployments server take and give.

Requests may use the fields of OpenAI and Databricks alike, and ``adapter``. Replies are OpenAI's objects; embeddings
carry an ``id``; a stream's last chunk with choices carries ``usage``. An error is ``{"error_code", "message"}`` with
the codes of MLflow's REST API.
"""

from __future__ import annotations

from typing import Any

from ..errors import ServingError
from ..reply import Reply
from ..request import RawRequest, Task, ValidRequest
from . import wire
from .base import ErrorBody, StreamEncoder
from .databricks import ERROR_CODES as DATABRICKS_CODES
from .decode import decode
from .errors import retry_headers
from .tables import MLFLOW

# MLflow's own names where they say more; all are in mlflow.protos.databricks_pb2.ErrorCode
ERROR_CODES: dict[str, str] = {
    **DATABRICKS_CODES,
    "bad_request": "BAD_REQUEST",
    "unavailable": "TEMPORARILY_UNAVAILABLE",
    "overloaded": "TEMPORARILY_UNAVAILABLE",
    "shutting_down": "TEMPORARILY_UNAVAILABLE",
    "engine_died": "TEMPORARILY_UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "aborted": "CANCELLED",
}


class MlflowDialect:
    """A pure codec; one object serves every request."""

    name = "mlflow"
    style = wire.Style(usage_in_last=True, embedding_id=True)

    def decode(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        return decode(MLFLOW, body, task)

    def encode(self, request: ValidRequest, reply: Reply) -> dict[str, Any]:
        return wire.reply(request, reply, self.style)

    def stream(self, request: ValidRequest) -> StreamEncoder:
        return wire.Stream(request, self.style, lambda error: self.error(error).body)

    def error(self, error: ServingError) -> ErrorBody:
        body = {"error_code": ERROR_CODES[error.kind], "message": error.message}
        return ErrorBody(status=error.status, body=body, headers=retry_headers(error))
