"""The Databricks Foundation Model API.

Source of the format: its REST reference; docs/structures.md says how open points are settled. Replies are OpenAI's
objects without the details of usage; a stream's last chunk with choices carries ``usage``; embeddings carry an ``id``.
An error is ``{"error_code", "message"}``. On endpoints with a Databricks profile the index of a completion is that of
its prompt, as the document says; elsewhere it is the place among all choices, as in OpenAI's API. ``n`` and
``error_behavior`` depend on the kind of endpoint, not on the format: ``tasks.prepare`` refuses them by the endpoint's
profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from ...interface.request import RawCompletion, RawRequest, Task
from ..base import Exchange, InferenceRoute
from ..fields.tables import DATABRICKS
from .codec import CodedErrorDialect
from .replies import Style
from .reply_types import EITHER_SCORES, EXCHANGES

ERROR_CODES: dict[str, str] = {
    "internal": "INTERNAL_ERROR",
    "bad_request": "INVALID_PARAMETER_VALUE",
    "invalid_field": "INVALID_PARAMETER_VALUE",
    "context_too_long": "INVALID_PARAMETER_VALUE",
    "unauthenticated": "UNAUTHENTICATED",
    "permission_denied": "PERMISSION_DENIED",
    "not_found": "RESOURCE_DOES_NOT_EXIST",
    "method_not_allowed": "INVALID_PARAMETER_VALUE",
    "already_exists": "RESOURCE_ALREADY_EXISTS",
    "conflict": "INVALID_STATE",
    "payload_too_large": "INVALID_PARAMETER_VALUE",
    "ends_engines": "INVALID_PARAMETER_VALUE",
    "limit_exceeded": "REQUEST_LIMIT_EXCEEDED",
    "unavailable": "RESOURCE_EXHAUSTED",
    "overloaded": "RESOURCE_EXHAUSTED",
    "shutting_down": "RESOURCE_EXHAUSTED",
    "engine_died": "INTERNAL_ERROR",
    "deadline_exceeded": "INTERNAL_ERROR",
    "aborted": "INVALID_STATE",
}


class DatabricksDialect(CodedErrorDialect):
    """Databricks' routes. If the path does not name the task, it follows from the fields of the body."""

    name = "databricks"
    tables = DATABRICKS
    forms: ClassVar[Mapping[Task, Exchange]] = {**EXCHANGES, "score": EITHER_SCORES}
    error_codes = ERROR_CODES
    style = Style(usage_details=False, usage_in_last=True, index_by_prompt=True, embedding_id=True)
    routes = (
        InferenceRoute("/serving-endpoints/<name>/invocations", None, "Query an endpoint; the body says the task"),
        InferenceRoute("/serving-endpoints/chat/completions", "chat", "Chat; model names the endpoint"),
        InferenceRoute("/serving-endpoints/completions", "completions", "Completion; model names the endpoint"),
        InferenceRoute("/serving-endpoints/embeddings", "embeddings", "Embeddings; model names the endpoint"),
    )
    prefixes = ("/serving-endpoints", "/api/2.0/serving-endpoints", "/.well-known")

    def read(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        """Read a body. ``use_raw_prompt`` is false by default, as in the document: the chat template is applied."""
        raw = super().read(body, task)
        if isinstance(raw, RawCompletion) and raw.use_raw_prompt is None:
            return msgspec.structs.replace(raw, use_raw_prompt=False)
        return raw
