"""Sampling parameters resolved against an endpoint: every field gets its final value."""

from __future__ import annotations

import msgspec

from ..interface.constraint import Grammar
from ..interface.errors import ContextTooLong, InvalidField
from ..interface.request import Beams, RawBeams, RawSampling, Sampling
from .drafts import draft_tokens
from .prompt.endpoint import EndpointView
from .token_lists import bad_words, embedding_bias, end_ids, stop_sequences

MASK = 2**64 - 1
# Logits are divided by temperatures and penalties in float32; smaller divisors would overflow its range. Below this
# temperature the best token is drawn in any case; with this penalty a token of the text outranks all others.
MIN_TEMPERATURE = 1e-5
MIN_DIVISOR = 1e-9


def resolve(
    asked: RawSampling,
    endpoint: EndpointView,
    max_prompt_tokens: int,
    own: RawSampling,
    grammar: Grammar | None = None,
    *,
    score_prompt: bool = False,
) -> Sampling:
    """Return the request's sampling parameters, each with its final value.

    ``max_prompt_tokens`` is the length of the longest prompt. ``own`` has the model's default lengths; these never
    cause a request to be refused.
    ``score_prompt`` asks for the prompt's log probabilities too, where the request asks for any. Raises
    ``InvalidField``, and ``ContextTooLong`` if max_tokens does not fit.
    """
    profile = endpoint.profile
    max_tokens = _max_tokens(asked, endpoint, max_prompt_tokens, own.max_tokens or profile.default_max_tokens)
    if asked.min_tokens is not None and asked.min_tokens > max_tokens:
        raise InvalidField("min_tokens", asked.min_tokens, f"at most max_tokens, {max_tokens}")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    runs = stop_sequences(asked, endpoint)
    ends = (*end_ids(asked, endpoint), *(run[0] for run in runs if len(run) == 1))
    temperature = _or(asked.temperature, profile.default_temperature)
    top_k = profile.default_top_k if asked.top_k is None else asked.top_k
    if asked.exact_bounds:
        _check_exact_bounds(asked, endpoint, max_prompt_tokens)
    resolved = Sampling(
        max_tokens=max_tokens,
        min_tokens=min(own.min_tokens or 0, max_tokens) if asked.min_tokens is None else asked.min_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=_or(asked.top_p, profile.default_top_p),
        top_k=0 if top_k >= endpoint.info.vocab_size else top_k,
        min_p=_or(asked.min_p, 0.0),
        typical_p=max(_or(asked.typical_p, 1.0), MIN_DIVISOR),
        repetition_penalty=max(_or(asked.repetition_penalty, 1.0), MIN_DIVISOR),
        presence_penalty=_or(asked.presence_penalty, 0.0),
        frequency_penalty=_or(asked.frequency_penalty, 0.0),
        logit_bias=_logit_bias(asked.logit_bias, endpoint),
        stop_token_ids=_stop_token_ids(asked.stop_token_ids, ends, endpoint),
        logprobs=logprobs,
        prompt_logprobs=logprobs if score_prompt else None,
        grammar=grammar,
        bad_words=bad_words(asked, endpoint),
        stop_sequences=tuple(run for run in runs if len(run) > 1),
        no_repeat_ngram_size=_ngram_size(asked.no_repeat_ngram_size),
        embedding_bias=embedding_bias(asked.embedding_bias, endpoint.info.vocab_size),
        penalize_prompt=bool(asked.penalize_prompt),
        context_logits=bool(asked.context_logits),
        generation_logits=bool(asked.generation_logits),
        draft=draft_tokens(asked, endpoint),
    )
    return resolved if asked.beams is None else _searched(resolved, asked, asked.beams, endpoint)


def _searched(sampling: Sampling, asked: RawSampling, raw: RawBeams, endpoint: EndpointView) -> Sampling:
    """Return ``sampling`` as a beam search. Nothing is drawn, so temperature and truncation get neutral values."""
    if not endpoint.info.capabilities.beam_search:
        raise InvalidField(raw.field, raw.width, "null: this model's engine has no beam search")
    beams = Beams(
        width=raw.width,
        length_penalty=_or(raw.length_penalty, 1.0),
        early_stopping=raw.early_stopping or "heuristic",
        num_groups=raw.num_groups or 1,
        diversity_penalty=_or(raw.diversity_penalty, 0.0),
        field=raw.field,
    )
    return msgspec.structs.replace(sampling, beams=beams, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, typical_p=1.0)


def check_nothing_generated(asked: RawSampling, *, echo: bool) -> None:
    """Check a request whose ``max_tokens`` is 0.

    Raises ``InvalidField`` if there would be nothing to answer, or if a field would have no effect.
    """
    if not echo and not asked.context_logits:
        raise InvalidField("max_tokens", 0, "an integer above 0, or echo: true beside it, which scores the prompt")
    if asked.generation_logits:
        raise InvalidField("generation_logits", True, "false with max_tokens 0: no token is generated")
    if asked.beams is not None:
        raise InvalidField(asked.beams.field, asked.beams.width, "null with max_tokens 0: no beam search runs")
    if asked.constraint is not None and asked.constraint.kind != "text":
        raise InvalidField(
            asked.constraint.field, asked.constraint.value, "null with max_tokens 0: no text is generated"
        )
    if asked.draft is not None:
        raise InvalidField(asked.draft.field, "a draft", "null with max_tokens 0: no text is generated")


def seeds(first: int, count: int) -> list[int]:
    """Return distinct uint64 seeds for a request's sequences.

    The first is the request's own seed, so that n=1 gives the same text as choice 0 of any n. The others are the output
    of SplitMix64: one distant value for each step, the same on every machine.
    """
    return [first, *(_splitmix(first, i) for i in range(1, count))]


def _splitmix(seed: int, step: int) -> int:
    z = (seed + step * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(given: RawSampling, endpoint: EndpointView, max_prompt_tokens: int, default: int | None) -> int:
    room = endpoint.context - max_prompt_tokens
    asked, maximum = given.max_tokens, endpoint.profile.dialects.maxIterTimes
    if asked is None:
        return min(room, default or room, maximum or room)
    if maximum is not None and asked > maximum:
        if not given.clip_max_tokens:
            raise InvalidField("max_tokens", asked, f"an integer in [1, {maximum}]: this endpoint's maxIterTimes")
        asked = maximum
    if asked <= room:
        return asked
    if given.error_behavior == "truncate" or given.clip_max_tokens:
        return room
    text = (
        f"max_tokens: {asked} does not fit: the prompt has {max_prompt_tokens} tokens and this model's maximum context "
        f"length is {endpoint.context} tokens, which leaves {room}"
    )
    raise ContextTooLong(text, param="max_tokens")


def _check_exact_bounds(asked: RawSampling, endpoint: EndpointView, max_prompt_tokens: int) -> None:
    size, dialects = endpoint.info.vocab_size, endpoint.profile.dialects
    if asked.top_k is not None and asked.top_k >= size:
        raise InvalidField("top_k", asked.top_k, f"an integer in [0, {size - 1}]: less than the vocabulary's size")
    if dialects.maxSeqLen is not None and dialects.maxIterTimes is not None:
        maximum = dialects.maxSeqLen - dialects.maxIterTimes
        if max_prompt_tokens > maximum:
            text = f"prompt: {max_prompt_tokens} tokens; at most {maximum} are allowed: maxSeqLen less maxIterTimes"
            raise ContextTooLong(text, param="prompt")


def _ngram_size(given: int | None) -> int:
    if given is not None and given < 0:
        raise InvalidField("no_repeat_ngram_size", given, "an integer of at least 0")
    return given or 0


def _logit_bias(given: dict[int, float] | None, endpoint: EndpointView) -> tuple[tuple[int, float], ...]:
    for token_id in given or {}:
        if token_id >= endpoint.info.vocab_size:
            raise InvalidField("logit_bias", token_id, f"token ids below {endpoint.info.vocab_size}")
    return tuple(sorted((given or {}).items()))


def _stop_token_ids(
    given: tuple[int, ...] | None, ends: tuple[int, ...], endpoint: EndpointView
) -> tuple[int, ...]:  # fmt: skip
    if given is not None and len(given) > endpoint.profile.max_stop_strings:
        raise InvalidField("stop_token_ids", f"{len(given)} ids", f"at most {endpoint.profile.max_stop_strings}")
    for i, token_id in enumerate(given or ()):
        if token_id >= endpoint.info.vocab_size:
            raise InvalidField(f"stop_token_ids[{i}]", token_id, f"a token id below {endpoint.info.vocab_size}")
    return tuple(dict.fromkeys((*ends, *(given or ()))))
