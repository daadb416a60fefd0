"""OpenVINO Model Server's API below ``/v3``: chat completions, completions and embeddings.

Source of the format: its document of ``/v3/chat/completions``. Replies are OpenAI's objects, with the ``id`` and
``usage`` that the document leaves out. An error is ``{"error": "..."}``. ``/v1/config`` and the lists of models are in
``http.openvino``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError
from ...interface.request import RawRequest, Task
from ..base import InferenceRoute
from ..openai.codec import ObjectDialect
from ..openai.replies import Style
from .fields import TABLES, read_request


class OpenVINODialect(ObjectDialect):
    """OpenAI's objects with another form of error."""

    name = "openvino"
    tables = TABLES
    style = Style()
    routes = (
        InferenceRoute("/v3/chat/completions", "chat", "Chat completion as OpenVINO Model Server has it"),
        InferenceRoute("/v3/completions", "completions", "Text completion as OpenVINO Model Server has it"),
        InferenceRoute("/v3/embeddings", "embeddings", "Embeddings"),
    )
    prefixes = ("/v3", "/v1/config")
    error_schema: Mapping[str, Any] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    @functools.cached_property
    def request_schemas(self) -> Mapping[Task, Mapping[str, Any]]:
        return {task: _schema(task) for task in TABLES}

    def read(self, body: dict[str, Any], task: Task | None = None) -> RawRequest:
        return read_request(body, task)

    def error_body(self, error: ServingError) -> dict[str, Any]:
        return {"error": error.message}


def _schema(task: Task) -> Mapping[str, Any]:
    """Return the schema of a task, in which ``model`` is required."""
    found = TABLES[task].schema()
    found["properties"]["model"] = {"type": "string", "description": TABLES[task].fields["model"].description}
    return {**found, "required": ["model", *found["required"]]}
