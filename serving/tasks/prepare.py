"""Turns a raw request into a ``ValidRequest``. No other module builds one, and no other knows its rules.

Values that the caller left open are resolved against the endpoint: the adapter, the model's own defaults, sampling,
seeds, the time limit. Requests that are not allowed are refused: a task or an adapter that does not exist, a field that
the endpoint's mode does not take, more of anything than the profile allows. Every refusal is a ``RequestError`` that
names the field.
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..interface.errors import InvalidField, RequestError
from ..interface.logits_size import check_logits
from ..interface.request import (
    RawChat,
    RawCompletion,
    RawEmbedding,
    RawRequest,
    RawSampling,
    RawScore,
    ReplyForm,
    Scoring,
    Sequence,
    Task,
    ValidRequest,
)
from .chat import prepare_chat
from .grammar_request import grammar
from .media.images import ImageRoom, keep_any
from .prompt.endpoint import EndpointView, Profile
from .prompt.prompts import Prompt, completion_prompts, embedding_inputs, is_raw
from .prompt.scored_texts import encoder_texts, pairs
from .reply_size import check_size
from .request_weights import adapter_of, check_lora_task, check_prompt_table
from .sampling import check_nothing_generated, resolve, seeds

T = TypeVar("T", bound=Struct)
MASK = 2**64 - 1
CONTENT: Mapping[Task, str] = {"chat": "messages", "completions": "prompt", "embeddings": "input", "score": "query"}
# The model's defaults of these also give way to the room in the context, so ``sampling.resolve`` applies them.
LENGTHS = ("max_tokens", "min_tokens")


def _shares_nothing(asked: str | None) -> str | None:
    return None


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of one request in addition to its endpoint's profile.

    ``timeout`` is the number of seconds that the server and the caller's headers allow, None for no limit.
    ``cache_salt`` makes ``ValidRequest.cache_salt`` from the request's own salt (``tasks.cache_salt``); by default,
    prefixes are shared with no other request. ``tenant``, ``weight`` and ``background`` are as in ``ValidRequest``.
    ``keep_pixels`` makes room for so many bytes of decoded images before they are decoded, or raises the refusal.
    """

    timeout: float | None = None
    cache_salt: Callable[[str | None], str | None] = _shares_nothing
    tenant: str = ""
    weight: int = 1
    background: bool = False
    keep_pixels: Callable[[int], None] = keep_any


NO_LIMITS = Limits()


def prepare(
    raw: RawRequest,
    endpoint: EndpointView,
    limits: Limits = NO_LIMITS,
    *,
    request_id: str | None = None,
    now: float | None = None,
    created: int | None = None,
) -> ValidRequest:
    """Return the request as the engine gets it: with defaults, template, token ids and seeds, and checked limits.

    ``now`` is in seconds of ``time.monotonic()``, ``created`` in seconds since the epoch; they and ``request_id`` are
    made here if they are None. Raises ``InvalidField``, ``ContextTooLong`` and ``RequestError``, which name the field,
    ``NotFound`` for an adapter or a model that does not exist, and ``Overloaded`` if no process is free to render the
    template.
    """
    adapter = adapter_of(raw, endpoint)
    raw = _with_template_of(adapter, raw, endpoint)
    task = raw.task
    check_task(task, endpoint)
    own = endpoint.defaults(task)
    if own is not None:
        raw = with_defaults(raw, own)
    _check_rules(raw, endpoint)
    timeout = raw.timeout if isinstance(raw, RawEmbedding | RawScore) else raw.sampling.timeout
    head = ValidRequest(  # the fields that requests of all tasks have
        request_id=request_id or uuid.uuid4().hex,
        task=task,
        sequences=(),
        created=int(time.time()) if created is None else created,
        adapter=adapter,
        model=raw.model or endpoint.name,
        model_version=endpoint.version,
        cache_salt=limits.cache_salt(raw.cache_salt),
        deadline=_deadline(now, timeout, limits.timeout, endpoint.profile.timeout),
        tenant=limits.tenant,
        weight=limits.weight,
        background=limits.background,
        return_trace=raw.return_trace,
    )
    if isinstance(raw, RawEmbedding):
        valid = _embedding(raw, endpoint, head)
    elif isinstance(raw, RawScore):
        valid = _score(raw, endpoint, head)
    else:
        lengths = RawSampling() if own is None or isinstance(own, RawEmbedding | RawScore) else own.sampling
        room = ImageRoom(limits.tenant, limits.keep_pixels)
        valid = _generation(raw, endpoint, head, lengths, room)
    check_logits(valid, endpoint.info.vocab_size, endpoint.info.max_logits_bytes)
    check_size(valid, raw, endpoint.profile, endpoint.info.embedding_dim)
    return valid


def _with_template_of(adapter: str | None, raw: RawRequest, endpoint: EndpointView) -> RawRequest:
    """Return ``raw`` with the chat template that its adapter has of its own, if the request names none."""
    if adapter is None or isinstance(raw, RawEmbedding | RawScore) or raw.chat_template is not None:
        return raw
    own = endpoint.text.template_of_adapter(adapter)
    return raw if own is None else msgspec.structs.replace(raw, chat_template=own)


def check_task(task: Task, endpoint: EndpointView) -> None:
    """Raise ``RequestError`` for a task that the endpoint's model does not support; encoders can score too."""
    if task not in endpoint.info.tasks and not (task == "score" and "embeddings" in endpoint.info.tasks):
        field = CONTENT[task]
        raise RequestError(f"{field}: this model does {', '.join(endpoint.info.tasks)}, not {task}", param=field)


def with_defaults(raw: RawRequest, own: RawRequest) -> RawRequest:
    """Return ``raw`` with the model's own defaults in the fields that it leaves open."""
    if isinstance(raw, RawEmbedding | RawScore) or isinstance(own, RawEmbedding | RawScore):
        return _filled(raw, own)
    return _filled(raw, own, sampling=_filled(raw.sampling, own.sampling, without=LENGTHS))


def _filled(given: T, defaults: Struct, *, without: tuple[str, ...] = (), **changed: Any) -> T:
    for name in given.__struct_fields__:
        if getattr(given, name) is None and name not in without and (value := getattr(defaults, name)) is not None:
            changed[name] = value
    return msgspec.structs.replace(given, **changed)


def _check_rules(raw: RawRequest, endpoint: EndpointView) -> None:
    """Check the number of stop strings, and the fields that only some kinds of endpoints take (``modes``), as in the
    Databricks API.

    ``n: 1`` passes, because every endpoint does that anyway; ``error_behavior`` is refused with any value.
    """
    profile = endpoint.profile
    check_lora_task(raw, endpoint)
    check_prompt_table(raw, endpoint)
    if isinstance(raw, RawEmbedding):
        n, error_behavior, stops = None, raw.error_behavior, None
        _check_embedding(raw, endpoint)
    elif isinstance(raw, RawScore):
        n, error_behavior, stops = None, None, None
    else:
        n, error_behavior, stops = raw.sampling.n, raw.sampling.error_behavior, raw.sampling.stop
    if n is not None and n != 1 and not profile.allow_n:
        raise InvalidField("n", n, "1: more choices are available on provisioned throughput endpoints only")
    if error_behavior is not None and not profile.allow_error_behavior:
        allowed = "no value: it is available on pay-per-token endpoints only"
        raise InvalidField("error_behavior", error_behavior, allowed)
    if stops is not None:
        if len(stops) > profile.max_stop_strings:
            raise InvalidField("stop", f"{len(stops)} strings", f"at most {profile.max_stop_strings} strings")
        if (size := sum(map(len, stops))) > profile.max_stop_chars:
            raise InvalidField("stop", f"{size} characters", f"at most {profile.max_stop_chars} in total")


def _check_embedding(raw: RawEmbedding, endpoint: EndpointView) -> None:
    dim = endpoint.info.embedding_dim
    if raw.stream:
        raise InvalidField("stream", True, "false: embeddings are not streamed")
    if raw.dimensions is not None and not 1 <= raw.dimensions <= dim:
        raise InvalidField("dimensions", raw.dimensions, f"an integer in [1, {dim}]")


def _deadline(now: float | None, *timeouts: float | None) -> float | None:
    """Return the time at which the shortest of ``timeouts`` ends; a caller cannot extend the limits of the server."""
    min_timeout = math.inf
    for timeout in timeouts:
        if timeout is not None and timeout < min_timeout:
            min_timeout = timeout
    if min_timeout == math.inf:
        return None
    return (time.monotonic() if now is None else now) + min_timeout


def _generation(
    raw: RawChat | RawCompletion, endpoint: EndpointView, head: ValidRequest, lengths: RawSampling, room: ImageRoom
) -> ValidRequest:
    profile, asked = endpoint.profile, raw.sampling
    n = asked.n or 1
    if isinstance(raw, RawChat):
        prompt, tools, begins_in_reasoning, read_as, held_to, images = prepare_chat(raw, endpoint, head.deadline, room)
        prompts = [prompt]
    else:
        prompts, tools, begins_in_reasoning, read_as = completion_prompts(raw, endpoint), None, False, None
        held_to, images = grammar(asked, endpoint), ()
    if n * len(prompts) > profile.max_sequences:
        maximum = profile.max_sequences // len(prompts)
        raise InvalidField("n", n, f"an integer in [1, {maximum}] with {len(prompts)} prompts")
    raw_prompt = isinstance(raw, RawCompletion) and is_raw(raw, endpoint)
    echo = isinstance(raw, RawCompletion) and bool(raw.echo)
    if asked.max_tokens == 0:
        check_nothing_generated(asked, echo=echo)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    sampling = resolve(asked, endpoint, longest, lengths, held_to, score_prompt=echo)
    if sampling.prompt_logprobs is not None and not raw_prompt:
        raise InvalidField("echo", True, "false with logprobs, unless use_raw_prompt is true")
    if sampling.prompt_logprobs is not None and raw.prompt_table is not None:
        raise InvalidField(
            "echo", True, "false with logprobs and prompt_embedding_table: its tokens have no probability"
        )
    return msgspec.structs.replace(
        head,
        sequences=_sequences(prompts, n, asked.seed),
        sampling=sampling,
        n=n,
        index_by_prompt=profile.index_by_prompt,
        continues_prompt=raw_prompt or (isinstance(raw, RawChat) and raw.end == "open"),
        stop=asked.stop or (),
        include_stop_str_in_output=bool(asked.include_stop_str_in_output),
        skip_special_tokens=asked.skip_special_tokens is not False,
        tools=tools,
        begins_in_reasoning=begins_in_reasoning,
        read_as=read_as,
        stream=raw.stream,
        usage_chunks=raw.usage_chunks,
        timings=raw.timings,
        form=_form(profile),
        echo=tuple(prompt.text for prompt in prompts) if echo else (),
        suffix=(raw.suffix or "") if isinstance(raw, RawCompletion) else "",
        truncate_on_timeout=asked.error_behavior == "truncate",
        truncated=any(prompt.truncated for prompt in prompts),
        clipped=asked.max_tokens is not None and asked.max_tokens > sampling.max_tokens == endpoint.context - longest,
        lora_task=raw.lora_task,
        prompt_table=raw.prompt_table,
        images=images,
    )


def _form(profile: Profile) -> ReplyForm:
    dialects = profile.dialects
    return ReplyForm(
        full_text=bool(dialects.fullTextEnabled),
        times=dialects.generateProfile == "current",
        end_text=bool(dialects.generateEndText),
    )


def _embedding(raw: RawEmbedding, endpoint: EndpointView, head: ValidRequest) -> ValidRequest:
    inputs = embedding_inputs(raw, endpoint)
    return msgspec.structs.replace(
        head,
        sequences=tuple(Sequence(prompt_token_ids=entry.token_ids) for entry in inputs),
        dimensions=raw.dimensions,
        encoding_format=raw.encoding_format or "float",
        truncated=any(entry.truncated for entry in inputs),
    )


def _score(raw: RawScore, endpoint: EndpointView, head: ValidRequest) -> ValidRequest:
    if len(raw.documents) > endpoint.profile.max_prompts:
        allowed = f"at most {endpoint.profile.max_prompts}"
        raise InvalidField(raw.names[1], f"{len(raw.documents)} texts", allowed)
    crosses = "score" in endpoint.info.tasks
    if not crosses and raw.activate is not None:
        raise InvalidField("use_activation", raw.activate, "null: this model's scores are cosines, as they are")
    texts = pairs(raw, endpoint) if crosses else encoder_texts(raw, endpoint)
    spec = endpoint.text.cross_encoder
    scoring = Scoring(
        num_queries=0 if crosses else len(raw.queries),
        activation="identity" if spec is None or raw.activate is False else spec.activation,
        ranked=raw.ranked,
        top_n=raw.top_n or None,
        documents=raw.documents if raw.ranked and raw.return_documents is not False else None,
    )
    return msgspec.structs.replace(
        head,
        sequences=tuple(Sequence(prompt_token_ids=ids) for ids in texts.sequences),
        second_from=texts.second_from,
        scoring=scoring,
    )


def _sequences(prompts: list[Prompt], n: int, seed: int | None) -> tuple[Sequence, ...]:
    first = secrets.randbits(64) if seed is None else seed & MASK
    drawn = iter(seeds(first, n * len(prompts)))
    return tuple(
        Sequence(prompt_token_ids=p.token_ids, seed=next(drawn), context_logits_from=len(p.token_ids) if choice else 0)
        for p in prompts
        for choice in range(n)
    )
