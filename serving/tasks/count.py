"""The tokens of a prompt that is only to be looked at: prepared as a request's is, and run by nobody.

It is what the engine would be given, to the token, except that a prompt longer than the model's context is counted too
(``most``): whether it fits is what callers want to know.
"""

from __future__ import annotations

import dataclasses

import msgspec

from ..dialect_settings import DialectSettings
from ..errors import ContextTooLong
from ..request import RawChat, RawCompletion, RawEmbedding, RawRequest, RawSampling, RawScore
from .endpoint import EndpointView
from .prepare import check_task, prepare, with_defaults
from .prompts import embedding_limit, instructed, is_raw
from .scored_texts import pair_limit

MOST = 2**18  # tokens of a prompt that are counted at least, however short the context: encoding them takes a second


def most(endpoint: EndpointView) -> int:
    """The most tokens that a counted prompt may have."""
    return max(MOST, endpoint.context)


def room(endpoint: EndpointView) -> int:
    """Tokens that the model takes: prompt and completion together, or one input, or a pair of texts."""
    if endpoint.generates:
        return endpoint.context
    return pair_limit(endpoint) if "score" in endpoint.info.tasks else embedding_limit(endpoint)


def prompt_tokens(given: RawChat | RawCompletion | RawEmbedding, endpoint: EndpointView) -> tuple[int, ...]:
    """The token ids of the first prompt or input of ``given``, with template, tools, instruction and special tokens.

    What ``given`` says of sampling has no say here. Raises what ``prepare`` does, ``ContextTooLong`` above ``most``.
    """
    check_task(given.task, endpoint)
    raw: RawRequest = given
    own = endpoint.defaults(raw.task)
    if own is not None:
        raw = with_defaults(raw, own)
    assert not isinstance(raw, RawScore)
    if isinstance(raw, RawEmbedding):
        text = instructed(raw, endpoint)[0]
        _check_size(text, endpoint, "input")
        return endpoint.text.encode_input(text)
    if isinstance(raw, RawCompletion) and is_raw(raw, endpoint) and isinstance(raw.prompts[0], str):
        return text_tokens(raw.prompts[0], endpoint)
    size = most(endpoint) + 1
    roomy = msgspec.structs.replace(endpoint.info, max_model_len=size, max_kv_tokens=size)
    profile = dataclasses.replace(endpoint.profile, dialects=DialectSettings())
    sampling = RawSampling(max_tokens=1, constraint=raw.sampling.constraint)
    try:
        valid = prepare(
            msgspec.structs.replace(raw, sampling=sampling), dataclasses.replace(endpoint, info=roomy, profile=profile)
        )
    except ContextTooLong as error:
        raise _too_many(error.param or "prompt", endpoint) from None
    if valid.truncated:  # by the model's own default of error_behavior
        raise _too_many("prompt", endpoint)
    return valid.sequences[0].prompt_token_ids


def text_tokens(text: str, endpoint: EndpointView, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The token ids of ``text`` as it stands, whatever a request would put around it. Raises ``ContextTooLong`` above
    ``most``."""
    _check_size(text, endpoint, "prompt")
    if add_special_tokens and not endpoint.generates:
        return endpoint.text.encode_input(text)
    return endpoint.text.encode(text, add_special_tokens)


def _check_size(text: str, endpoint: EndpointView, path: str) -> None:
    if endpoint.text.surely_over(text, most(endpoint)) is not None:
        raise _too_many(path, endpoint)


def _too_many(path: str, endpoint: EndpointView) -> ContextTooLong:
    return ContextTooLong(f"{path}: more than {most(endpoint)} tokens, which are the most that are counted", param=path)
