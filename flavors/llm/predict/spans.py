"""Spans of answers in the caller's process: children of MLflow's active span, if there is one.

Nothing is traced by itself: each ``predict`` of a notebook would write a trace to the tracking server. Within a
function under ``mlflow.trace``, and in ``mlflow.genai.evaluate``, every answer is a span with its token usage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ....serving.dialects.openai.span_values import SPAN_TYPES, choices_of, token_usage
from ....serving.interface.reply import Done, Piece, Reply, Vector
from ....serving.interface.request import ValidRequest
from ....serving.tasks.reply.pieces import gather

USAGE = "mlflow.chat.tokenUsage"


class AnswerSpan:
    """The span of an answer to ``request``, sent as ``asked``; nothing if no span of MLflow is active when it opens.

    ``took``, or ``see`` with each piece, notes the answer. ``end`` and ``fail`` end it; ending twice is harmless.
    """

    def __init__(self, request: ValidRequest, asked: Mapping[str, Any] | None, content_hash: str) -> None:
        self._request = request
        self._seen: list[Piece] = []
        self._span: Any = None
        if (parent := active()) is None:
            return
        from mlflow.tracing.fluent import start_span_no_context

        inputs = None if asked is None else {name: value for name, value in asked.items() if value is not None}
        kind = SPAN_TYPES.get(request.task, "UNKNOWN")
        self._span = start_span_no_context(name=request.task, span_type=kind, parent_span=parent, inputs=inputs)
        facts = {
            "mlflow.llm.model": request.model,
            "mlflow.llm.provider": "mlflow-llm",
            "mlflow.message.format": "openai",
            "mlflow_llm.content_hash": content_hash,
            "mlflow_llm.adapter": request.adapter,
        }
        for name, value in facts.items():
            if value:
                self._span.set_attribute(name, value)

    def took(self, reply: Reply) -> None:
        """Note the token usage of a whole answer, and its choices if it is text."""
        if self._span is None:
            return
        usage = token_usage(reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.usage.completion_tokens)
        self._span.set_attribute(USAGE, usage)
        if reply.choices:
            choices = choices_of(self._request.task, reply.choices)
            self._span.set_outputs({"model": self._request.model, "choices": choices})

    def see(self, piece: Piece) -> None:
        """Note a piece of a stream; the last one, ``Done``, makes the answer whole."""
        if self._span is None:
            return
        if not isinstance(piece, Vector):  # of which nothing is shown
            self._seen.append(piece)
        if isinstance(piece, Done):
            self.took(gather(self._seen))
            self.end()

    def fail(self, error: BaseException) -> None:
        """End it with the error, or as it is where a caller only wants no more of it."""
        span = self._span
        if span is not None and isinstance(error, Exception) and not isinstance(error, StopAsyncIteration):
            span.record_exception(error)
            span.set_status("ERROR")
        self.end()

    def end(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()


@contextmanager
def answering(request: ValidRequest, asked: Mapping[str, Any] | None, content_hash: str) -> Iterator[AnswerSpan]:
    """Open a span that ends with the block."""
    span = AnswerSpan(request, asked, content_hash)
    try:
        yield span
    except BaseException as error:
        span.fail(error)
        raise
    span.end()


def active() -> Any:
    """Return MLflow's active span; None if there is none, without importing MLflow's tracing for it."""
    fluent = sys.modules.get("mlflow.tracing.fluent")
    return None if fluent is None else fluent.get_current_active_span()
