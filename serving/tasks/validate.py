"""The one place where a raw request becomes a ``ValidRequest``: defaults resolved, template applied, tokenised, seeds
drawn, limits checked. Everything it refuses is a ``RequestError`` naming the field."""

from __future__ import annotations

import secrets
import time
import uuid
from typing import NamedTuple

from ..errors import InvalidField, RequestError
from ..request import RawChat, RawCompletion, RawEmbedding, RawRequest, Sequence, Task, ValidRequest
from .endpoint import EndpointView
from .prompts import Prompt, chat_prompt, completion_prompts, embedding_inputs, is_raw
from .reply_size import check_size
from .sampling import resolve, seeds

MASK = 2**64 - 1


class _Head(NamedTuple):
    """``now`` is what a deadline is counted from, ``created`` a label."""

    request_id: str
    now: float
    created: int
    adapter: str | None
    model: str
    cache_salt: str | None


def validate(
    raw: RawRequest,
    endpoint: EndpointView,
    *,
    request_id: str | None = None,
    now: float | None = None,
    created: int | None = None,
    cache_salt: str | None = None,
) -> ValidRequest:
    """``now`` is seconds of ``time.monotonic()``, ``created`` seconds since the epoch; ``cache_salt`` says with whom
    prefixes are shared (``tasks.cache_salt``), None with nobody. Raises ``InvalidField``, ``ContextTooLong``,
    ``NotFound``."""
    head = _Head(
        request_id=request_id or uuid.uuid4().hex,
        now=time.monotonic() if now is None else now,
        created=int(time.time()) if created is None else created,
        adapter=endpoint.find_adapter(raw.model, raw.adapter),
        model=raw.model or endpoint.name,
        cache_salt=cache_salt,
    )
    task = _task(raw, endpoint)
    valid = _built(raw, endpoint, head, task)
    check_size(valid, raw, endpoint.profile, endpoint.info.embedding_dim)
    return valid


def _built(raw: RawRequest, endpoint: EndpointView, head: _Head, task: Task) -> ValidRequest:
    if isinstance(raw, RawEmbedding):
        return _embedding(raw, endpoint, head)
    return _generation(raw, endpoint, head, task)


def _task(raw: RawRequest, endpoint: EndpointView) -> Task:
    task: Task = "embeddings"
    field = "input"
    if isinstance(raw, RawChat):
        task, field = "chat", "messages"
    elif isinstance(raw, RawCompletion):
        task, field = "completions", "prompt"
    if task not in endpoint.info.tasks:
        raise RequestError(f"{field}: this model does {', '.join(endpoint.info.tasks)}, not {task}", param=field)
    return task


def _generation(raw: RawChat | RawCompletion, endpoint: EndpointView, head: _Head, task: Task) -> ValidRequest:
    profile, asked = endpoint.profile, raw.sampling
    _check_endpoint_kind(raw, endpoint)
    n = asked.n or 1
    prompts = [chat_prompt(raw, endpoint)] if isinstance(raw, RawChat) else completion_prompts(raw, endpoint)
    if n * len(prompts) > profile.max_sequences:
        most = profile.max_sequences // len(prompts)
        raise InvalidField("n", n, f"an integer in [1, {most}] with {len(prompts)} prompts")
    raw_prompt = isinstance(raw, RawCompletion) and is_raw(raw, endpoint)
    echo = isinstance(raw, RawCompletion) and bool(raw.echo)
    sampling = resolve(raw, endpoint, max(len(p.token_ids) for p in prompts), score_prompt=echo)
    if sampling.prompt_logprobs is not None and not raw_prompt:
        raise InvalidField("echo", True, "false with logprobs, unless use_raw_prompt is true")
    truncate = asked.error_behavior == "truncate"
    return ValidRequest(
        request_id=head.request_id,
        task=task,
        model=head.model,
        adapter=head.adapter,
        cache_salt=head.cache_salt,
        sequences=_sequences(prompts, n, asked.seed),
        sampling=sampling,
        n=n,
        index_by_prompt=profile.index_by_prompt,
        stop=asked.stop or (),
        include_stop_str_in_output=bool(asked.include_stop_str_in_output),
        skip_special_tokens=asked.skip_special_tokens is not False,
        stream=raw.stream,
        include_usage=raw.include_usage,
        echo=tuple(p.text for p in prompts) if echo else (),
        suffix=(raw.suffix or "") if isinstance(raw, RawCompletion) else "",
        truncate_on_timeout=truncate,
        truncated=any(p.truncated for p in prompts),
        created=head.created,
        deadline=_deadline(asked.timeout, endpoint, head.now),
    )


def _embedding(raw: RawEmbedding, endpoint: EndpointView, head: _Head) -> ValidRequest:
    dim = endpoint.info.embedding_dim
    if raw.stream:
        raise InvalidField("stream", True, "false: embeddings are not streamed")
    if raw.dimensions is not None and not 1 <= raw.dimensions <= dim:
        raise InvalidField("dimensions", raw.dimensions, f"an integer in [1, {dim}]")
    if raw.error_behavior is not None and not endpoint.profile.allow_error_behavior:
        raise _not_pay_per_token(raw.error_behavior)
    inputs = embedding_inputs(raw, endpoint)
    return ValidRequest(
        request_id=head.request_id,
        task="embeddings",
        model=head.model,
        adapter=head.adapter,
        sequences=tuple(Sequence(prompt_token_ids=p.token_ids) for p in inputs),
        dimensions=raw.dimensions,
        encoding_format=raw.encoding_format or "float",
        truncated=any(p.truncated for p in inputs),
        created=head.created,
        deadline=_deadline(raw.timeout, endpoint, head.now),
    )


def _sequences(prompts: list[Prompt], n: int, seed: int | None) -> tuple[Sequence, ...]:
    first = secrets.randbits(64) if seed is None else seed & MASK
    drawn = iter(seeds(first, n * len(prompts)))
    return tuple(Sequence(prompt_token_ids=p.token_ids, seed=next(drawn)) for p in prompts for _ in range(n))


def _check_endpoint_kind(raw: RawChat | RawCompletion, endpoint: EndpointView) -> None:
    profile, asked = endpoint.profile, raw.sampling
    if asked.n is not None and asked.n != 1 and not profile.allow_n:
        raise InvalidField("n", asked.n, "1: more choices need an endpoint with provisioned throughput")
    if asked.error_behavior is not None and not profile.allow_error_behavior:
        raise _not_pay_per_token(asked.error_behavior)
    stops = asked.stop or ()
    if len(stops) > profile.max_stop_strings:
        raise InvalidField("stop", f"{len(stops)} strings", f"at most {profile.max_stop_strings} strings")
    if sum(map(len, stops)) > profile.max_stop_chars:
        raise InvalidField("stop", f"{sum(map(len, stops))} characters", f"at most {profile.max_stop_chars} in total")


def _not_pay_per_token(value: str) -> InvalidField:
    return InvalidField("error_behavior", value, "null: only pay-per-token endpoints take it")


def _deadline(timeout: float | None, endpoint: EndpointView, now: float) -> float | None:
    """The earlier of the caller's and the endpoint's; a caller cannot lengthen what the endpoint allows."""
    limits = [limit for limit in (timeout, endpoint.profile.timeout) if limit is not None]
    return now + min(limits) if limits else None
