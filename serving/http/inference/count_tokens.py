"""Count the input tokens of a message or a response without generating one."""

from __future__ import annotations

from ...dialects import DIALECTS
from ...dialects.anthropic.requests import COUNT_BODY, check_headers, read_count_request
from ...dialects.responses.fields import COUNT_TABLE
from ...dialects.responses.fields import read_count_request as read_response_count
from ...frontend.answer import Answer
from ...frontend.operation import Auth, Request
from ...frontend.worker_state import WorkerState
from ...interface.readers import Reader
from ...interface.request import RawChat
from ...tasks.count import prompt_tokens
from ...tasks.prompt.endpoint import EndpointView
from ..route import Route
from .count import counting


def _counted(raw: RawChat, endpoint: EndpointView) -> dict[str, int]:
    return {"input_tokens": len(prompt_tokens(raw, endpoint))}


_count = counting(read_count_request, _counted)


def count_tokens(server: WorkerState, request: Request) -> Answer:
    """Count the input tokens for which the same message would be billed. Raises ``ServingError``."""
    check_headers(request.headers)
    return _count(server, request)


def _response_counted(raw: RawChat, endpoint: EndpointView) -> dict[str, object]:
    return {"object": "response.input_tokens", **_counted(raw, endpoint)}


ROUTES = (
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="Count the tokens of a message's input",
        dialect=DIALECTS["anthropic"],
        auth=Auth.INVOKE,
        body=COUNT_BODY,
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=counting(read_response_count, _response_counted),
        summary="Count the tokens of a response's input",
        dialect=DIALECTS["responses"],
        auth=Auth.INVOKE,
        body=Reader(lambda value, _: read_response_count(value), COUNT_TABLE.schema()),
    ),
)
