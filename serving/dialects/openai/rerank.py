"""Ranking documents by a query, in the form of Jina's and Cohere's APIs, which vLLM has too; errors are OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from ...interface.errors import ServingError
from ...interface.request import RawRequest, RawScore, Task
from ..base import Exchange, Head, InferenceRoute
from ..errors import OPENAI_ERROR_SCHEMA, openai_error
from ..fields.fields import Table
from ..fields.tables import RERANK
from .codec import ObjectDialect
from .replies import Style
from .reply_types import RANKING

COHERE = "/v2/rerank"  # its replies have documents only if the request asks for them


class RerankDialect(ObjectDialect):
    """One task, on each of the paths that clients use."""

    name = "rerank"
    tables: ClassVar[Mapping[Task, Table]] = {"score": RERANK}
    forms: ClassVar[Mapping[Task, Exchange]] = {"score": RANKING}
    style = Style()
    routes = tuple(
        InferenceRoute(path, "score", "Rank documents by their relevance to a query")
        for path in ("/v1/rerank", "/rerank", COHERE)
    )
    error_schema = OPENAI_ERROR_SCHEMA

    def decode(self, head: Head, body: bytes) -> RawRequest:
        raw = super().decode(head, body)
        if isinstance(raw, RawScore) and raw.return_documents is None:
            return msgspec.structs.replace(raw, return_documents=head.route.path != COHERE)
        return raw

    def read(self, body: dict[str, Any], task: Task | None = "score") -> RawRequest:
        return super().read(body, "score")

    def error_body(self, error: ServingError) -> dict[str, Any]:
        return openai_error(error)
