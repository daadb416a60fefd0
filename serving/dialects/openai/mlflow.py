"""MLflow's form: what ``predict`` of a logged model, the scoring server and the deployments server accept and return.

Requests may use the fields of both OpenAI and Databricks, and ``adapter``. Replies are OpenAI's objects; embeddings
carry an ``id``; a stream's last chunk with choices carries ``usage``. An error is ``{"error_code", "message"}`` with
the codes of MLflow's REST API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...interface.request import Task
from ..base import Exchange, InferenceRoute
from ..fields.tables import MLFLOW
from .codec import CodedErrorDialect
from .databricks import ERROR_CODES as DATABRICKS_CODES
from .replies import Style
from .reply_types import EITHER_SCORES, EXCHANGES

# MLflow's own codes where they are more precise; all are in mlflow.protos.databricks_pb2.ErrorCode
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


class MlflowDialect(CodedErrorDialect):
    """The routes of MLflow's servers; also the form in which ``predict`` accepts and returns objects."""

    name = "mlflow"
    tables = MLFLOW
    forms: ClassVar[Mapping[Task, Exchange]] = {**EXCHANGES, "score": EITHER_SCORES}
    error_codes = ERROR_CODES
    style = Style(usage_in_last=True, embedding_id=True)
    routes = (
        InferenceRoute("/invocations", None, "Query the server's only endpoint; the body says the task"),
        InferenceRoute("/endpoints/<name>/invocations", None, "Query an endpoint"),
    )
