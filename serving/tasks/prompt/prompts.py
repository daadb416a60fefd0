"""Turns a caller's texts into the token ids of each prompt: chat template, context length, truncation.

With ``error_behavior: truncate`` a prompt that is too long loses its oldest tokens (a leading BOS stays) until
``max_tokens`` fits after it, or a quarter of the context if the caller set no ``max_tokens``. At most half of the
context is reserved for ``max_tokens``, so that some of the prompt always remains. An embedding input that is too long
loses its end instead, because the encoders were trained that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ...interface.errors import ContextTooLong, InvalidField
from ...interface.request import ChatEnd, Message, RawChat, RawCompletion, RawEmbedding, RawSampling
from ...model_files.image_layout import Size, expanded
from .conversation import (
    check_turns,
    effort_variables,
    template_messages,
    template_variables,
    thinking_variables,
    with_system,
)
from .endpoint import EndpointView
from .text import CHARACTERS_PER_TOKEN
from .tool_messages import check_tool_messages
from .tool_prompts import template_name, with_tools


class Prompt(NamedTuple):
    """One prompt. ``text`` is what the caller wrote, for ``echo``; "" for a chat.

    ``images`` are the numbers of tokens of its images."""

    token_ids: tuple[int, ...]
    text: str = ""
    truncated: bool = False
    images: tuple[int, ...] = ()


def is_raw(raw: RawCompletion, endpoint: EndpointView) -> bool:
    """Return whether prompts go to the model without the chat template.

    The request decides, or else the profile. A model without a template always gets raw prompts.
    """
    if raw.use_raw_prompt is not None:
        return raw.use_raw_prompt or not endpoint.text.has_template(raw.chat_template)
    return endpoint.profile.raw_prompts or not endpoint.text.has_template(raw.chat_template)


def chat_prompt(raw: RawChat, endpoint: EndpointView, images: tuple[Size, ...] = ()) -> Prompt:
    """Return the prompt of a chat: the template's text as token ids, with those of ``images``, given their sizes.

    Raises ``InvalidField`` for turns, variables or tool calls that the endpoint or the template does not accept, and
    ``ContextTooLong``.
    """
    profile = endpoint.profile
    if len(raw.messages) > profile.max_messages:
        raise InvalidField("messages", f"{len(raw.messages)} messages", f"at most {profile.max_messages}")
    if raw.end == "open" and raw.messages[-1].role != "assistant":
        last = f"messages[{len(raw.messages) - 1}].role"
        raise InvalidField(
            last, raw.messages[-1].role, '"assistant": continue_final_message needs an assistant message last'
        )
    if profile.strict_turns:
        check_turns(raw.messages, raw.end)
    check_tool_messages(raw.messages, raw.end)
    template = template_name(raw, endpoint.text)
    reads = endpoint.text.reads(template)
    reasons = endpoint.text.tool_format(template).reasoning is not None
    switched = thinking_variables(raw.thinking, reads, reasons=reasons) | effort_variables(raw, reads, reasons=reasons)
    variables = template_variables(raw.chat_template_kwargs, reads) | switched
    messages = with_system(raw.messages, profile.default_system_prompt)
    given, tools = with_tools(messages, raw, endpoint.text)
    return _templated(given, endpoint, raw.sampling, template, {**variables, **tools}, end=raw.end, images=images)


def completion_prompts(raw: RawCompletion, endpoint: EndpointView) -> list[Prompt]:
    """Return a prompt for each text or list of token ids.

    Raises ``InvalidField`` and ``ContextTooLong``, which name ``prompt[i]``.
    """
    if len(raw.prompts) > endpoint.profile.max_prompts:
        raise InvalidField("prompt", f"{len(raw.prompts)} prompts", f"at most {endpoint.profile.max_prompts}")
    return [
        _completion_prompt(entry, raw, endpoint, f"prompt[{i}]" if raw.batched else "prompt")
        for i, entry in enumerate(raw.prompts)
    ]


def embedding_inputs(raw: RawEmbedding, endpoint: EndpointView) -> list[Prompt]:
    """Return each input as a prompt: the instruction, then the input, with the model's special tokens.

    Raises ``InvalidField`` and ``ContextTooLong``, which name ``input[i]``.
    """
    if len(raw.inputs) > endpoint.profile.max_prompts:
        raise InvalidField("input", f"{len(raw.inputs)} inputs", f"at most {endpoint.profile.max_prompts}")
    found = embedded_texts(raw, endpoint) if isinstance(raw.inputs[0], str) else _embedded_tokens(raw, endpoint)
    limit = embedding_limit(endpoint)
    prompts = []
    for i, (ids, cut) in enumerate(found):
        path = f"input[{i}]" if len(raw.inputs) > 1 else "input"
        if cut and raw.error_behavior != "truncate":
            raise ContextTooLong(f"{path}: more than {limit} tokens, which is the longest this model takes", param=path)
        if not ids:
            raise InvalidField(path, raw.inputs[i], "a text of at least one token")
        prompts.append(Prompt(ids, "", cut))
    return prompts


def instructed(raw: RawEmbedding, endpoint: EndpointView) -> list[str]:
    """Return each text of ``raw`` with its instruction in front, as it is tokenised."""
    prefix = _instruction(raw, endpoint)
    return [prefix + str(entry) for entry in raw.inputs]


def embedding_limit(endpoint: EndpointView) -> int:
    """Return the maximum number of tokens of an input."""
    spec = endpoint.text.embedding
    return min(endpoint.info.max_model_len, (spec.max_length if spec is not None else None) or 2**31)


def _completion_prompt(entry: str | tuple[int, ...], raw: RawCompletion, endpoint: EndpointView, path: str) -> Prompt:
    if not isinstance(entry, str):
        virtual = 0 if raw.prompt_table is None else raw.prompt_table.num_tokens
        check_token_ids(entry, endpoint, path, virtual)
        cut, truncated = _fit(entry, endpoint, raw.sampling, path)
        written = entry if not virtual else tuple(i for i in entry if i < endpoint.info.vocab_size)
        return Prompt(cut, endpoint.text.decode(written, skip_special_tokens=False) if raw.echo else "", truncated)
    if not is_raw(raw, endpoint):
        messages = with_system((Message(role="user", content=entry),), endpoint.profile.default_system_prompt)
        return _templated(template_messages(messages), endpoint, raw.sampling, raw.chat_template, {}, path)._replace(
            text=entry
        )
    truncate = raw.sampling.error_behavior == "truncate"
    max_prompt = endpoint.max_prompt_tokens
    over = endpoint.text.surely_over(entry, max_prompt)
    if over is not None and not truncate:
        raise too_long(path, f"more than {max_prompt}", endpoint)
    text = entry if over is None else endpoint.text.tail(entry, max_prompt)
    ids = endpoint.text.encode(text)
    if not ids:
        raise InvalidField(path, entry, "a text of at least one token")
    cut, truncated = _fit(ids, endpoint, raw.sampling, path)
    return Prompt(cut, entry, truncated or over is not None)


def _templated(
    messages: list[dict[str, Any]],
    endpoint: EndpointView,
    sampling: RawSampling,
    template: str | None,
    variables: dict[str, Any],
    path: str = "messages",
    end: ChatEnd = "generation_prompt",
    images: tuple[Size, ...] = (),
) -> Prompt:
    if images:  # a prompt that is cut could end in the middle of one
        sampling = msgspec.structs.replace(sampling, error_behavior=None)
    truncate = sampling.error_behavior == "truncate"
    max_prompt = endpoint.max_prompt_tokens
    ids = endpoint.text.chat(
        messages,
        template=template,
        variables=variables,
        limit=None if truncate else max_prompt,
        context=max_prompt,
        end=end,
    )
    if isinstance(ids, int):
        raise too_long(path, f"more than {max_prompt}", endpoint)
    if not ids:
        raise InvalidField(path, "", "messages from which the template makes a prompt of at least one token")
    ids, counts = _with_images(ids, images, endpoint) if images else (ids, ())
    cut, truncated = _fit(ids, endpoint, sampling, path)
    return Prompt(cut, "", truncated, counts)


def _with_images(
    ids: tuple[int, ...], images: tuple[Size, ...], endpoint: EndpointView
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``ids`` with the tokens of the images, and how many each has.

    Raises ``InvalidField`` if the template did not write a place for each image."""
    spec = endpoint.text.images
    assert spec is not None, "images are refused before"
    places = ids.count(spec.placeholder_id)
    if places != len(images):
        raise InvalidField(
            "messages", f"{len(images)} images", f"as many as the model's chat template has written, {places}"
        )
    return expanded(ids, images, spec, endpoint.info.vocab_size)


def _fit(
    ids: tuple[int, ...], endpoint: EndpointView, sampling: RawSampling, path: str
) -> tuple[tuple[int, ...], bool]:
    """Return ``(ids, truncated)``. The ids leave room for at least one token, unless ``max_tokens`` is 0."""
    context, max_prompt = endpoint.context, endpoint.max_prompt_tokens
    minimum = 0 if sampling.max_tokens == 0 else 1
    if sampling.error_behavior != "truncate":
        if len(ids) + minimum > context or len(ids) > max_prompt:
            raise too_long(path, str(len(ids)), endpoint)
        return ids, False
    asked = context // 4 if sampling.max_tokens is None else sampling.max_tokens
    room = max(minimum, min(asked, context // 2))
    if len(ids) + room <= context and len(ids) <= max_prompt:
        return ids, False
    if sampling.max_tokens is None and len(ids) < context and len(ids) <= max_prompt:
        return ids, False
    keep = min(context - room, max_prompt)
    lead = endpoint.text.leading_ids
    if lead and ids[: len(lead)] == lead and keep > len(lead):
        return lead + ids[len(ids) - keep + len(lead) :], True
    return ids[len(ids) - keep :], True


def too_long(path: str, count: str, endpoint: EndpointView) -> ContextTooLong:
    """Return the error for a prompt of ``count`` tokens at ``path``."""
    allowed = f"this model's maximum context length is {endpoint.context} tokens, prompt and completion together"
    if endpoint.max_prompt_tokens < endpoint.context:
        allowed = f"a prompt of this endpoint has at most {endpoint.max_prompt_tokens} (maxInputTokenLen)"
    return ContextTooLong(f"{path}: {count} tokens; {allowed}", param=path)


def check_token_ids(ids: tuple[int, ...], endpoint: EndpointView, path: str, virtual: int = 0) -> None:
    """Raise ``InvalidField``, which names ``path[i]``, for an id outside the vocabulary.

    The ids of ``virtual`` tokens follow those of the model's own tokens.
    """
    size = endpoint.info.vocab_size + virtual
    for i, token_id in enumerate(ids):
        if token_id >= size:
            raise InvalidField(f"{path}[{i}]", token_id, f"a token id below {size}")


def _instruction(raw: RawEmbedding, endpoint: EndpointView) -> str:
    """Return the text to put before each input: the model's prompt of that name, or the instruction and a space."""
    spec = endpoint.text.embedding
    prompts = spec.prompts if spec is not None else {}
    if raw.instruction is None:
        name = spec.default_prompt if spec is not None else None
        return prompts.get(name, "") if name is not None else ""
    if raw.instruction in prompts:
        return prompts[raw.instruction]
    return raw.instruction if not raw.instruction or raw.instruction[-1].isspace() else raw.instruction + " "


def embedded_texts(raw: RawEmbedding, endpoint: EndpointView) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield ``(ids, cut)`` for each text.

    Only the beginning of a long text is encoded, unless that has so few tokens that the whole text is needed.
    """
    limit, prefix, text = embedding_limit(endpoint), _instruction(raw, endpoint), endpoint.text
    size = CHARACTERS_PER_TOKEN * limit
    beginnings = [prefix + str(entry[:size]) for entry in raw.inputs]
    for entry, (ids, cut) in zip(raw.inputs, text.encode_embeddings(beginnings, limit), strict=True):
        whole = cut or len(entry) <= size
        yield (ids, cut) if whole else next(text.encode_embeddings([prefix + str(entry)], limit))


def _foreign_ids(path: str, ids: tuple[int, ...], endpoint: EndpointView) -> InvalidField:
    """Return the error for ids that may be of another tokenizer, which would make the vector of another text."""
    frame = endpoint.text.frame
    own = f"or the ids of this model's own tokenizer with its special tokens ({frame}), as /tokenize returns them; "
    why = "ids of another tokenizer are another text here (langchain-openai sends such unless its"
    setting = "check_embedding_ctx_length=False). An endpoint with embeddingTokenIds takes any ids"
    return InvalidField(path, list(ids[:8]), f"a text, {own if frame else ''}{why} {setting}")


def _embedded_tokens(raw: RawEmbedding, endpoint: EndpointView) -> Iterator[tuple[tuple[int, ...], bool]]:
    limit = embedding_limit(endpoint)
    for i, entry in enumerate(raw.inputs):
        assert not isinstance(entry, str), "a dialect reads texts or token ids, never both"
        path = f"input[{i}]" if raw.batched else "input"
        check_token_ids(entry, endpoint, path)
        if not endpoint.profile.dialects.embeddingTokenIds and not endpoint.text.is_own_input(entry):
            raise _foreign_ids(path, entry, endpoint)
        if raw.instruction is not None:
            raise InvalidField("instruction", raw.instruction, "null where input is token ids")
        yield entry[:limit], len(entry) > limit
