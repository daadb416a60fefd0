"""Tokens without a run: a prompt's tokens or their number (``/tokenize``, ``count_tokens``), and the text of tokens.

Such a request takes the same path as in ``invoke``, as far as the prompt: authentication, its body within the memory
budget, the endpoint and adapter. No engine sees it, it is not admitted, and so it is not billed.

A route with such a handler, in any dialect::

    Route(
        method="POST",
        path="/v1/…/count_tokens",
        handler=counting(read, answer),
        summary="…",
        dialect=DIALECTS["…"],
        auth=Auth.INVOKE,
        body=Reader(read, schema),
    )

``read(body)`` makes a ``Raw`` of the JSON object; ``answer(raw, view)`` makes the object of the reply, for example
from ``tasks.count.prompt_tokens(raw, view)``. Both may raise ``RequestError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ...dialects import DIALECTS
from ...dialects.anthropic.reply_types import COUNT_EXAMPLE as MESSAGE_COUNT
from ...dialects.anthropic.reply_types import TokenCount
from ...dialects.anthropic.requests import COUNT_BODY, check_headers, read_count_request
from ...dialects.json_body import json_bytes, read_object
from ...dialects.openai.reply_types import Detokenized, Tokenized
from ...dialects.openai.tokenize import (
    RawDetokenize,
    RawTokenize,
    detokenized,
    read_detokenize,
    read_tokenize,
    tokenized,
)
from ...dialects.responses.fields import COUNT_TABLE
from ...dialects.responses.fields import read_count_request as read_response_count
from ...dialects.responses.reply_types import COUNT_EXAMPLE as RESPONSE_COUNT
from ...dialects.responses.reply_types import InputTokens
from ...frontend.addressing import address, candidates, check_limits, record_served
from ...frontend.answer import Answer
from ...frontend.operation import Auth, Handler, Request
from ...frontend.worker_state import WorkerState
from ...interface.labels import NONE
from ...interface.readers import Reader
from ...interface.request import Raw, RawChat, RawCompletion, RawEmbedding
from ...tasks.count import prompt_tokens, room, text_tokens
from ...tasks.prompt.endpoint import EndpointView
from ...tasks.prompt.prompts import check_token_ids
from ..route import Route

R = TypeVar("R", bound=Raw)


def counting(read: Callable[[dict[str, Any]], R], answer: Callable[[R, EndpointView], Any]) -> Handler:
    """Make a handler that responds with ``answer(raw, view)`` as JSON. The handler raises ``ServingError``."""

    def handle(server: WorkerState, request: Request) -> Answer:
        server.load_shedder.check_open()
        endpoints, record = server.endpoints.seen_by(request.caller), request.record
        check_limits(server, request, candidates(endpoints, request), None)
        with server.memory.allocate(request.payer(server)) as allocation:
            body = request.receive(allocation)
            raw = server.offload(len(body), read_object, body, read)
            entity, raw = address(endpoints, request, raw)
            record.endpoint = entity.endpoint
            endpoints.check_use(request.caller, entity, entity.view.find_adapter(None, raw.adapter))
            record_served(request, entity)
            record.labels = raw.labels or NONE
            encoded = server.offload(len(body), lambda: json_bytes(answer(raw, entity.view)))
            allocation.grow(len(encoded))
        return Answer(body=encoded, headers=dict(record.headers))

    return handle


def tokenize(raw: RawTokenize, view: EndpointView) -> Tokenized:
    tokens = _tokens(raw, view)
    return tokenized(tokens, room(view), view.text.token_names(tokens) if raw.return_token_strs else None)


def _tokens(raw: RawTokenize, view: EndpointView) -> tuple[int, ...]:
    if raw.chat is not None:
        return prompt_tokens(msgspec.structs.replace(raw.chat, model=raw.model, adapter=raw.adapter), view)
    if raw.add_special_tokens is not None:
        return text_tokens(raw.prompt, view, raw.add_special_tokens)
    if view.generates:
        return prompt_tokens(RawCompletion(prompts=(raw.prompt,), model=raw.model, adapter=raw.adapter), view)
    if "embeddings" not in view.info.tasks:  # a cross-encoder, which takes pairs: the prompt is one side of a pair
        return text_tokens(raw.prompt, view)
    return prompt_tokens(RawEmbedding(inputs=(raw.prompt,), model=raw.model, adapter=raw.adapter), view)


def detokenize(raw: RawDetokenize, view: EndpointView) -> Detokenized:
    check_token_ids(raw.tokens, view, "tokens")
    return detokenized(view.text.decode(raw.tokens, skip_special_tokens=False))


def _counted(raw: RawChat, endpoint: EndpointView) -> TokenCount:
    return {"input_tokens": len(prompt_tokens(raw, endpoint))}


_count = counting(read_count_request, _counted)


def count_tokens(server: WorkerState, request: Request) -> Answer:
    """Count the input tokens for which the same message would be billed. Raises ``ServingError``."""
    check_headers(request.headers)
    return _count(server, request)


def _response_counted(raw: RawChat, endpoint: EndpointView) -> InputTokens:
    return {"object": "response.input_tokens", **_counted(raw, endpoint)}


ROUTES = (
    Route(
        method="POST",
        path="/tokenize",
        reply=Tokenized,
        example={"model": "assistant", "prompt": "a cat"},
        handler=counting(lambda body: read_tokenize(body, ""), tokenize),
        summary="Tokenize a prompt or a chat",
        dialect=DIALECTS["openai"],
        auth=Auth.INVOKE,
        body=read_tokenize,
    ),
    Route(
        method="POST",
        path="/detokenize",
        reply=Detokenized,
        example={"model": "assistant", "tokens": [64, 65]},
        handler=counting(lambda body: read_detokenize(body, ""), detokenize),
        summary="Detokenize token ids",
        dialect=DIALECTS["openai"],
        auth=Auth.INVOKE,
        body=read_detokenize,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        reply=TokenCount,
        example=MESSAGE_COUNT,
        handler=count_tokens,
        summary="Count the tokens of a message's input",
        dialect=DIALECTS["anthropic"],
        auth=Auth.INVOKE,
        body=COUNT_BODY,
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        reply=InputTokens,
        example=RESPONSE_COUNT,
        handler=counting(read_response_count, _response_counted),
        summary="Count the tokens of a response's input",
        dialect=DIALECTS["responses"],
        auth=Auth.INVOKE,
        body=Reader(lambda value, _: read_response_count(value), COUNT_TABLE.schema()),
    ),
)
