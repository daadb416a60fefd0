"""Counts the input tokens of a message without generating one."""

from __future__ import annotations

from ..dialects import DIALECTS
from ..dialects.anthropic_requests import COUNT_BODY, check_headers, read_count_request
from ..request import RawChat
from ..tasks.count import prompt_tokens
from ..tasks.endpoint import EndpointView
from .answer import Answer
from .count import counting
from .route import Auth, Request, Route
from .server import Server


def _counted(raw: RawChat, endpoint: EndpointView) -> dict[str, int]:
    return {"input_tokens": len(prompt_tokens(raw, endpoint))}


_count = counting(read_count_request, _counted)


def count_tokens(server: Server, request: Request) -> Answer:
    """The tokens that the same message would be billed for. Raises ``ServingError``."""
    check_headers(request.headers)
    return _count(server, request)


ROUTES = (
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="The number of tokens of a message's input",
        dialect=DIALECTS["anthropic"],
        auth=Auth.INVOKE,
        body=COUNT_BODY,
    ),
)
