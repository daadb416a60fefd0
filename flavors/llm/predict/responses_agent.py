"""A logged model as MLflow's ``ResponsesAgent``: requests and replies in the form of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from mlflow.pyfunc import ResponsesAgent
from mlflow.types.responses import ResponsesAgentRequest, ResponsesAgentResponse, ResponsesAgentStreamEvent

from ....serving.dialects.base import Head
from ....serving.dialects.responses.dialect import ResponsesDialect
from ....serving.interface.request import ValidRequest
from ..errors import as_mlflow
from .session import Session

_DIALECT = ResponsesDialect()
_HEAD = Head(route=_DIALECT.routes[0], headers={})
_EVENT = b"\n\n"


class LoggedModelAgent(ResponsesAgent):
    """A loaded model as a ``ResponsesAgent``.

    A request's ``custom_inputs`` hold fields that MLflow's type lacks (``top_logprobs``, ``seed``); its
    ``context.user_id`` becomes ``user``. Errors are ``MlflowException``, like those of ``load_model``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def predict(self, request: ResponsesAgentRequest) -> ResponsesAgentResponse:
        """Answer one request."""
        with as_mlflow():
            valid = self._valid(request, stream=False)
            encoded = _DIALECT.encode(valid, self.session.reply(valid, asked=_shown(request)))
        return ResponsesAgentResponse(**json.loads(encoded.body))

    def predict_stream(self, request: ResponsesAgentRequest) -> Generator[ResponsesAgentStreamEvent, None, None]:
        """Yield the events of one reply as it is generated; closing the iterator aborts the request."""
        with as_mlflow():
            valid = self._valid(request, stream=True)
            encoder = _DIALECT.stream(valid)
            with self.session.answering(valid, _shown(request)) as span, self.session.pieces(valid) as pieces:
                for piece in pieces:
                    span.see(piece)
                    yield from _events(encoder.encode(piece))

    def close(self) -> None:
        """Release the engine. Closing twice is harmless."""
        self.session.close()

    def _valid(self, request: ResponsesAgentRequest, *, stream: bool) -> ValidRequest:
        body: dict[str, Any] = request.model_dump(exclude_none=True, exclude={"custom_inputs", "context"})
        context = request.context
        if context is not None and context.user_id is not None:
            body.setdefault("user", context.user_id)
        body = {**(request.custom_inputs or {}), **body, "stream": stream}
        return self.session.prepared(_DIALECT.decode(_HEAD, json.dumps(body).encode()))


def _shown(request: ResponsesAgentRequest) -> dict[str, Any]:
    shown: dict[str, Any] = request.model_dump(exclude_none=True)
    return shown


def _events(encoded: bytes) -> Generator[ResponsesAgentStreamEvent, None, None]:
    """Yield the objects in server-sent events."""
    for event in filter(None, encoded.split(_EVENT)):
        for line in event.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield ResponsesAgentStreamEvent(**json.loads(line.removeprefix(b"data: ")))
