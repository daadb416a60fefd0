"""The tokens of a prompt that is only counted or inspected: prepared as for a request, but never run.

They are exactly the tokens that the engine would get, except that a prompt longer than the model's context is counted
too (up to ``maximum``): callers want to know whether it fits.
"""

from __future__ import annotations

import dataclasses

import msgspec

from ..interface.dialect_settings import DialectSettings
from ..interface.errors import ContextTooLong
from ..interface.request import RawChat, RawCompletion, RawEmbedding, RawRequest, RawSampling, RawScore
from .prepare import check_task, prepare, with_defaults
from .prompt.endpoint import EndpointView
from .prompt.prompts import embedding_limit, instructed, is_raw
from .prompt.scored_texts import pair_limit

MAX_COUNTED_TOKENS = (
    2**18
)  # a prompt of up to this many tokens is counted, however short the context: encoding takes a second


def maximum(endpoint: EndpointView) -> int:
    """Return the maximum number of tokens of a counted prompt."""
    return max(MAX_COUNTED_TOKENS, endpoint.context)


def room(endpoint: EndpointView) -> int:
    """Return how many tokens the model accepts: prompt and completion together, or one input, or one pair of texts."""
    if endpoint.generates:
        return endpoint.context
    return pair_limit(endpoint) if "score" in endpoint.info.tasks else embedding_limit(endpoint)


def prompt_tokens(given: RawChat | RawCompletion | RawEmbedding, endpoint: EndpointView) -> tuple[int, ...]:
    """Return the token ids of the first prompt or input of ``given``, with template, tools, instruction and special
    tokens.

    Sampling parameters of ``given`` are ignored, except the constraint. Raises the same errors as ``prepare``, but
    ``ContextTooLong`` only above ``maximum``.
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
    size = maximum(endpoint) + 1
    roomy = msgspec.structs.replace(endpoint.info, max_model_len=size, max_kv_tokens=size)
    given_dialects = endpoint.profile.dialects
    dialects = DialectSettings(
        allowedLocalMediaPath=given_dialects.allowedLocalMediaPath,
        allowedMediaDomains=given_dialects.allowedMediaDomains,
    )
    profile = dataclasses.replace(endpoint.profile, dialects=dialects)
    sampling = RawSampling(max_tokens=1, constraint=raw.sampling.constraint)
    try:
        valid = prepare(
            msgspec.structs.replace(raw, sampling=sampling), dataclasses.replace(endpoint, info=roomy, profile=profile)
        )
    except ContextTooLong as error:
        raise _too_many(error.param or "prompt", endpoint) from None
    if valid.truncated:  # the model's own default of error_behavior has cut it
        raise _too_many("prompt", endpoint)
    ids, spec = valid.sequences[0].prompt_token_ids, endpoint.text.images
    if not valid.images or spec is None:
        return ids
    return tuple(spec.image_id if token_id >= endpoint.info.vocab_size else token_id for token_id in ids)


def text_tokens(text: str, endpoint: EndpointView, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of ``text`` alone, without the template or instruction that a request would add.

    Raises ``ContextTooLong`` above ``maximum``.
    """
    _check_size(text, endpoint, "prompt")
    if add_special_tokens and not endpoint.generates:
        return endpoint.text.encode_input(text)
    return endpoint.text.encode(text, add_special_tokens)


def _check_size(text: str, endpoint: EndpointView, path: str) -> None:
    if endpoint.text.surely_over(text, maximum(endpoint)) is not None:
        raise _too_many(path, endpoint)


def _too_many(path: str, endpoint: EndpointView) -> ContextTooLong:
    return ContextTooLong(
        f"{path}: more than {maximum(endpoint)} tokens, which are the most that are counted", param=path
    )
