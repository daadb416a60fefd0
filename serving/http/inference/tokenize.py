"""``/tokenize`` and ``/detokenize``: convert a prompt to the model's tokens, and tokens to text."""

from __future__ import annotations

from typing import Any

import msgspec

from ...dialects import DIALECTS
from ...dialects.openai.tokenize import (
    RawDetokenize,
    RawTokenize,
    detokenized,
    read_detokenize,
    read_tokenize,
    tokenized,
)
from ...frontend.operation import Auth
from ...interface.request import RawCompletion, RawEmbedding
from ...tasks.count import prompt_tokens, room, text_tokens
from ...tasks.prompt.endpoint import EndpointView
from ...tasks.prompt.prompts import check_token_ids
from ..route import Route
from .count import counting


def tokenize(raw: RawTokenize, view: EndpointView) -> dict[str, Any]:
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


def detokenize(raw: RawDetokenize, view: EndpointView) -> dict[str, Any]:
    check_token_ids(raw.tokens, view, "tokens")
    return detokenized(view.text.decode(raw.tokens, skip_special_tokens=False))


ROUTES = (
    Route(
        method="POST",
        path="/tokenize",
        handler=counting(lambda body: read_tokenize(body, ""), tokenize),
        summary="Tokenize a prompt or a chat",
        dialect=DIALECTS["openai"],
        auth=Auth.INVOKE,
        body=read_tokenize,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=counting(lambda body: read_detokenize(body, ""), detokenize),
        summary="Detokenize token ids",
        dialect=DIALECTS["openai"],
        auth=Auth.INVOKE,
        body=read_detokenize,
    ),
)
