"""Sampling by a Gumbel-max race: from logits to tokens, each sequence with its own parameters and random numbers.

The order is: embedding bias, penalties, logit bias, bad words and repeated n-grams, min_tokens, the grammar's mask,
temperature, top_k, top_p, min_p, typical_p, then the race: token t arrives at a time drawn from the exponential
distribution with its probability as the rate, and the first one wins. That is the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow and Minka 2014, "A* Sampling") with -log(time) as the Gumbel noise: a token wins with its probability.
The times are a function of (seed, position, t). Logits may differ in their last bits with the rest of the batch; in a
race that matters only if two tokens arrive together, while with cumulative probabilities every unlikely token after the
first difference would shift. The algorithm of a row depends only on its own parameters, so a sequence samples the same
alone and in a batch. The native kernels (native/sampler.h) and, on CUDA, ``device_race`` draw the same winners from the
same random bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...interface.events import TokenLogprob
from ...interface.request import Sampling
from ..constraints.grammar_state import unpacked
from ..devices.transfers import constant, to_device, upload
from ..native import sampler as native
from ..scheduling.sequence import NO_ALLOWED_TOKEN, Sampled, SamplePosition
from . import device_sampling
from .greedy import greedy_tokens
from .randomness import exponentials
from .rejection_sampling import draft_of, is_drafted
from .rejection_sampling import draw as draw_drafted
from .top_logits import MAX_COUNT, top_logits

MAX_TRUNCATED_CANDIDATES = 1024  # top tokens considered before a row with top_p is fully sorted
NEEDS_FULL_SORT = -3  # in place of a token, if the row has to be fully sorted first


def sample(logits: Any, sequences: Sequence[SamplePosition]) -> list[Sampled]:
    """Sample one token for each row of ``logits`` [B, V], which belong to ``sequences`` [B], with the requested log
    probabilities; ``logits`` is not changed."""
    tokens = choose(logits, sequences)
    result = [Sampled(t) for t in tokens]
    wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None and tokens[i] >= 0]
    if wanted:
        counts = [sequences[i].sampling.logprobs or 0 for i in wanted]
        scored = logprobs(logits[wanted], [tokens[i] for i in wanted], counts)
        for i, score in zip(wanted, scored, strict=True):
            result[i] = Sampled(tokens[i], score)
    return result


def choose(logits: Any, sequences: Sequence[SamplePosition]) -> list[int]:
    """Return one token id for each row of ``logits``, -1 if they are not finite."""
    tokens = _largest(logits)
    special = [i for i, s in enumerate(sequences) if tokens[i] >= 0 and not _is_settled(tokens[i], s)]
    if special and native.can_draw(logits):
        as_they_are = [i for i in special if not is_adjusted(sequences[i]) and _is_drawn_natively(sequences[i])]
        if as_they_are:
            for i, token in zip(as_they_are, _draw_rows(logits, as_they_are, sequences), strict=True):
                tokens[i] = token
            special = [i for i in special if i not in as_they_are]
    if special:
        rows = logits if len(special) == len(sequences) else logits[special]
        chosen = _sample_rows(rows.float().clone(), [sequences[i] for i in special])
        for i, token in zip(special, chosen, strict=True):
            tokens[i] = token
    return tokens


def _largest(logits: Any) -> list[int]:
    """Return the token with each row's largest logit, -1 if that is not finite."""
    if native.can_draw(logits):
        return native.largest(logits)
    tokens: list[int] = greedy_tokens(logits).tolist()
    return tokens


def _is_settled(largest: int, sequence: SamplePosition) -> bool:
    """Return whether the token with the largest logit is the result. A stop token that may not come yet does not change
    any other token's logit."""
    p = sequence.sampling
    if p.temperature != 0.0 or p.grammar is not None or has_logit_changes(sequence):
        return False
    return not forbids_stops(sequence, sequence.num_tokens) or largest not in p.stop_token_ids


def is_adjusted(sequence: SamplePosition) -> bool:
    """Return whether ``adjust`` changes the logits of a sequence."""
    return has_logit_changes(sequence) or forbids_stops(sequence, sequence.num_tokens)


def forbids_stops(sequence: SamplePosition, position: int) -> bool:
    """Return whether the token at ``position`` may not be a stop token."""
    p = sequence.sampling
    count = position - sequence.num_prompt + 1
    return p.min_tokens > 0 and bool(p.stop_token_ids) and not sequence.stop_rule.may_stop(count)


def has_logit_changes(sequence: SamplePosition) -> bool:
    """Return whether ``adjust`` may change logits of a sequence wherever it is."""
    return has_penalties(sequence) or bool(sequence.sampling.logit_bias) or sequence.processors is not None


def has_penalties(sequence: SamplePosition) -> bool:
    """Return whether the tokens that a sequence has change its logits."""
    p = sequence.sampling
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _is_drawn_natively(sequence: SamplePosition) -> bool:
    p = sequence.sampling
    return p.draft is None or not is_drafted(sequence)


def _draw_rows(logits: Any, rows: Sequence[int], sequences: Sequence[SamplePosition]) -> list[int]:
    """Draw natively, from logits that only a mask changes."""
    chosen = [sequences[i] for i in rows]
    masks = [None if s.grammar_state is None else s.grammar_state.allowed for s in chosen]
    seeds, positions = [s.seed for s in chosen], [s.num_tokens for s in chosen]
    return native.draw_rows(logits, rows, [s.sampling for s in chosen], seeds, positions, masks)


def score_prompt(logits: Any, start: int, sequence: SamplePosition) -> list[TokenLogprob]:
    """Return the log probabilities of the prompt tokens that the rows ``logits``, positions from ``start`` on,
    predict."""
    following = sequence.tokens[start + 1 : min(start + 1 + len(logits), sequence.num_prompt)].tolist()
    k = sequence.sampling.prompt_logprobs or 0
    return logprobs(logits[: len(following)], following, [k] * len(following)) if following else []


def logprobs(logits: Any, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Return log probabilities before penalties; ``counts`` is how many of the top tokens to list for each row."""
    own = torch.tensor(token_ids, device=logits.device)
    return listed(token_ids, *score(logits, own, max(counts)), counts)


def score(logits: Any, token_ids: Any, max_count: int) -> tuple[Any, Any, Any]:
    """Return the log probabilities of ``token_ids`` int64 [B], and of the best tokens with their ids, [B, count]."""
    if max_count <= MAX_COUNT and device_sampling.is_offered(logits.device):
        found = top_logits(logits, min(max(max_count, 1), logits.shape[-1]))
        own = logits.gather(1, token_ids[:, None])[:, 0].float() - found.totals
        return own, found.values[:, :max_count] - found.totals[:, None], found.ids[:, :max_count]
    scores = torch.log_softmax(logits.float(), dim=-1)
    own = scores.gather(1, token_ids[:, None])[:, 0]
    if not max_count:
        return own, scores[:, :0], own[:0].long()
    values, ids = scores.topk(min(max_count, scores.shape[-1]), dim=-1)
    return own, values, ids


def listed(token_ids: Sequence[int], own: Any, values: Any, ids: Any, counts: Sequence[int]) -> list[TokenLogprob]:
    """Return what ``score`` found as log probabilities, each with the best ``counts[i]`` tokens of its row."""
    probabilities: list[float] = own.tolist()
    if not max(counts):
        return [TokenLogprob(t, p) for t, p in zip(token_ids, probabilities, strict=True)]
    tops = [
        tuple(zip(i[:n], v[:n], strict=True)) for i, v, n in zip(ids.tolist(), values.tolist(), counts, strict=True)
    ]
    return [TokenLogprob(t, p, top) for t, p, top in zip(token_ids, probabilities, tops, strict=True)]


def _sample_rows(logits: Any, sequences: Sequence[SamplePosition]) -> list[int]:
    adjust(logits, sequences)
    restrict(logits, sequences)
    masked_rows = _fully_masked(logits, sequences)
    if masked_rows:
        logits[masked_rows] = 0.0  # any values that can be sampled from
    tokens: list[int] = [0] * len(sequences)
    kinds: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        kinds.setdefault(_kind(sequence), []).append(i)
    for kind, rows in kinds.items():
        some = logits if len(rows) == len(sequences) else logits[rows]
        drawn = draw_tokens(kind, some, [sequences[i] for i in rows])
        for i, token in zip(rows, drawn, strict=True):
            tokens[i] = token
    for i in masked_rows:
        tokens[i] = NO_ALLOWED_TOKEN
    return tokens


def _fully_masked(logits: Any, sequences: Sequence[SamplePosition]) -> list[int]:
    """Return the rows of ``logits`` in which all tokens are masked."""
    rows = [i for i, sequence in enumerate(sequences) if sequence.processors is not None]
    if not rows:
        return []
    dead = (logits[rows].amax(-1) == float("-inf")).tolist()
    return [i for i, is_dead in zip(rows, dead, strict=True) if is_dead]


def _kind(sequence: SamplePosition) -> str:
    p = sequence.sampling
    if p.temperature == 0.0:
        return "greedy"
    if p.draft is not None and is_drafted(sequence):
        return "drafted"
    if p.typical_p < 1.0:
        return "typical"
    return "truncated" if p.top_k > 0 or p.top_p < 1.0 else "whole"


def draw_tokens(kind: str, logits: Any, sequences: Sequence[SamplePosition]) -> list[int]:
    if kind == "greedy":
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    parameters = [s.sampling for s in sequences]
    seeds, positions = [s.seed for s in sequences], [s.num_tokens for s in sequences]
    if kind == "drafted":
        drafts, drafted = zip(*map(draft_of, sequences), strict=True)
        return draw_drafted(distribution(logits, parameters).cpu(), torch.stack(drafted), drafts, seeds, positions)
    if native.can_draw(logits):
        return native.draw(logits, parameters, seeds, positions)
    tokens: list[int] = _race_rows(kind, logits, greedy_tokens(logits), parameters, seeds, positions).tolist()
    for i in [i for i, token in enumerate(tokens) if token == NEEDS_FULL_SORT]:
        tokens[i] = _draw_sorted(logits[i : i + 1], parameters[i], seeds[i], positions[i])
    return tokens


def is_drawn_unread(sequence: SamplePosition) -> bool:
    """Return whether ``DeviceSampler`` supports a sequence: nothing that is requested needs its last token on the
    host."""
    p = sequence.sampling
    return p.grammar is None and p.draft is None and not p.generation_logits


def draw_unread(
    logits: Any,
    sequences: Sequence[SamplePosition],
    positions: Sequence[int],
    largest_tokens: Any,
    kinds: dict[str, list[int]],
) -> Any:
    """Return what ``choose`` draws of adjusted ``logits`` [B, V], int64 [B] on their device, without waiting for it;
    ``NEEDS_FULL_SORT`` where only ``choose`` can tell. ``positions`` are those of the tokens; ``largest_tokens`` are
    ``greedy_tokens(logits)``, and the result itself if all sequences are greedy; ``kinds`` are
    ``kinds_unread(sequences, ..)``."""
    tokens = largest_tokens
    for kind, rows in kinds.items():
        if kind == "greedy":
            continue
        chosen = [sequences[i] for i in rows]
        own = [s.sampling for s in chosen], [s.seed for s in chosen], [positions[i] for i in rows]
        if len(rows) == len(sequences):
            tokens = _race_rows(kind, logits, largest_tokens, *own)
        else:
            at = constant(tuple(rows), torch.int64, logits.device)
            drawn = _race_rows(kind, logits.index_select(0, at), largest_tokens.index_select(0, at), *own)
            tokens = tokens.index_copy(0, at, drawn)
    return tokens if tokens is largest_tokens else torch.where(largest_tokens < 0, -1, tokens)


def kinds_unread(sequences: Sequence[SamplePosition], device: Any) -> dict[str, list[int]]:
    """Return the rows of each way to draw. Only "truncated" ones may get ``NEEDS_FULL_SORT``."""
    kinds: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        kinds.setdefault(_kind_unread(sequence, device), []).append(i)
    return kinds


def _kind_unread(sequence: SamplePosition, device: Any) -> str:
    kind, p = _kind(sequence), sequence.sampling
    if kind not in ("truncated", "typical") or not device_sampling.is_offered(device):
        return kind
    if not p.top_k:
        return "whole"
    return "limited" if kind == "truncated" and p.top_k <= MAX_COUNT else kind


def _race_rows(
    kind: str,
    logits: Any,
    largest_tokens: Any,
    parameters: Sequence[Sampling],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> Any:
    """Return tokens int64 [B] on the device of ``logits`` [B, V], ``NEEDS_FULL_SORT`` for "truncated" rows that have to
    be fully sorted."""
    if kind == "limited":
        return device_sampling.race_limited(logits, parameters, seeds, positions)
    if device_sampling.is_offered(logits.device) and kind == "whole":
        best = logits.gather(1, largest_tokens.clamp_min(0)[:, None])[:, 0]
        return device_sampling.race(logits, best, parameters, seeds, positions)
    logits = logits.float() / _column(parameters, "temperature", torch.float32, logits.device)
    if kind == "truncated":
        return _draw_truncated(logits, parameters, seeds, positions)
    times = _times(seeds, positions, logits)
    if kind == "whole":
        return race(_min_p(torch.softmax(logits, -1), parameters), times)
    return _draw_typical(logits, parameters, times)


def _times(seeds: Sequence[int], positions: Sequence[int], like: Any) -> Any:
    size, device = like.shape[-1], like.device
    if device_sampling.is_offered(device):
        return device_sampling.exponentials(seeds, positions, size, device)
    return to_device(exponentials(seeds, positions, size), device)


def _times_at(ids: Any, seeds: Sequence[int], positions: Sequence[int], like: Any) -> Any:
    """Return the times of the tokens ``ids`` [B, N]."""
    if device_sampling.is_offered(like.device):
        return device_sampling.exponentials_at(ids, seeds, positions)
    return _times(seeds, positions, like).gather(1, ids)


def _draw_truncated(logits: Any, parameters: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Draw from the best ``MAX_TRUNCATED_CANDIDATES``; return ``NEEDS_FULL_SORT`` for rows that need more."""
    V = logits.shape[-1]
    width = min(V, max([MAX_TRUNCATED_CANDIDATES, *(p.top_k for p in parameters if p.top_k < V)]))
    values, ids = logits.topk(width, dim=-1)
    totals = torch.logsumexp(logits, -1, keepdim=True)
    times = _times_at(ids, seeds, positions, logits)
    tokens = ids.gather(1, race(truncate(values, totals, parameters), times)[:, None])[:, 0]
    wanted = [0.0 if 0 < p.top_k <= width else p.top_p for p in parameters]
    if width == V or not any(wanted):
        return tokens
    reached = torch.exp(values - totals).sum(-1).double()
    return torch.where(reached < constant(tuple(wanted), torch.float64, logits.device), NEEDS_FULL_SORT, tokens)


def _draw_sorted(logits: Any, parameters: Sampling, seed: int, position: int) -> int:
    """Draw from a row [1, V] by a full sort."""
    times = _times([seed], [position], logits)
    logits = logits / parameters.temperature
    whole, order = logits.sort(-1, descending=True)
    weights = truncate(whole, torch.logsumexp(logits, -1, keepdim=True), [parameters])
    return int(order[0, race(weights, times.gather(1, order))[0]])


def truncate(values: Any, totals: Any, parameters: Sequence[Sampling]) -> Any:
    """Return probabilities [B, N] (not summing to one) of logits in descending order after top_k, top_p and min_p.

    ``totals`` [B, 1] is the log of the whole row's sum; if top_k truncates, the remaining tokens count as the whole."""
    width = values.shape[-1]
    place = torch.arange(width, device=values.device)
    limits = tuple((p.top_k if 0 < p.top_k < width else width,) for p in parameters)
    top_k = constant(limits, torch.int64, values.device)
    limited = constant(tuple((p.top_k > 0,) for p in parameters), torch.bool, values.device)
    weights = torch.exp(values.double() - totals.double()).masked_fill(place >= top_k, 0.0)
    weights = torch.where(limited, weights / weights.sum(-1, keepdim=True), weights)
    before = weights.cumsum(-1) - weights
    keep = before < _column(parameters, "top_p", weights.dtype, weights.device)
    keep[:, 0] = True
    return _min_p(weights * keep, parameters)


def _draw_typical(logits: Any, parameters: Sequence[Sampling], times: Any) -> Any:
    weights, token_ids = typical(logits, parameters)
    return token_ids.gather(1, race(weights, times.gather(1, token_ids))[:, None])[:, 0]


def typical(logits: Any, parameters: Sequence[Sampling]) -> tuple[Any, Any]:
    """Apply locally typical sampling (Meister et al. 2022), which orders tokens by how close their surprise is to the
    entropy.

    Return probabilities [B, V] in that order, after top_k, top_p and min_p too, and their tokens."""
    totals = torch.logsumexp(logits, -1, keepdim=True)
    values, ids = logits.sort(-1, descending=True)
    weights = truncate(values, totals, parameters)
    weights = weights / weights.sum(-1, keepdim=True)
    surprise = -torch.log(weights)
    entropy = (weights * surprise).nan_to_num(0.0).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs().nan_to_num(float("inf"))
    order = torch.argsort(distance, dim=-1, stable=True)
    ordered = weights.gather(1, order)
    keep = ordered.cumsum(-1) - ordered < _column(parameters, "typical_p", ordered.dtype, ordered.device)
    keep[:, 0] = True
    return ordered * keep, ids.gather(1, order)


def distribution(logits: Any, parameters: Sequence[Sampling]) -> Any:
    """Return the distribution that tokens are sampled from with these parameters: float64 [B, V], each row summing to
    one."""
    weights, ids = typical(logits / _column(parameters, "temperature", logits.dtype, logits.device), parameters)
    found = torch.zeros_like(weights).scatter_(1, ids, weights)
    return found / found.sum(-1, keepdim=True)


def _min_p(weights: Any, parameters: Sequence[Sampling]) -> Any:
    if all(p.min_p == 0.0 for p in parameters):
        return weights
    floor = weights.amax(-1, keepdim=True) * _column(parameters, "min_p", weights.dtype, weights.device)
    return weights.masked_fill(weights < floor, 0.0)


def race(weights: Any, times: Any) -> Any:
    """Return the winners [B]: the index with the smallest ratio of time to weight; never one of weight 0.

    ``weights`` [B, N] need not sum to one; ``times`` [B, N] have rate one."""
    return (weights / times).argmax(-1)


def _column(parameters: Sequence[Sampling], name: str, dtype: Any, device: Any) -> Any:
    return constant(tuple((getattr(p, name),) for p in parameters), dtype, device)


def adjust(logits: Any, sequences: Sequence[SamplePosition]) -> None:
    """Apply biases, penalties, bad words, repeated n-grams and min_tokens to ``logits`` [B, V], in place.

    The repetition penalty is CTRL's (Keskar et al. 2019) over prompt and output, as in transformers, vLLM and
    TensorRT-LLM; presence and frequency penalties are OpenAI's, over the output alone, or TensorRT-LLM's, over both.
    Prompt ids after the vocabulary (``request.PromptTable``) are ignored."""
    V = logits.shape[-1]
    for i, sequence in enumerate(sequences):
        p, processors = sequence.sampling, sequence.processors
        if processors is not None and processors.bias is not None:
            logits[i] += processors.bias.to(logits.device, logits.dtype)
        if p.repetition_penalty != 1.0:
            ids = np.unique(sequence.tokens)
            seen = _index(ids[: np.searchsorted(ids, V)], logits)
            values = logits[i, seen]
            logits[i, seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.presence_penalty or p.frequency_penalty) and (sequence.num_generated or p.penalize_prompt):
            counted = sequence.tokens if p.penalize_prompt else sequence.output
            ids, counts = np.unique(counted[counted < V], return_counts=True)
            times = torch.from_numpy(counts).to(logits.device, logits.dtype)
            logits[i, _index(ids, logits)] -= p.presence_penalty + p.frequency_penalty * times
        if p.logit_bias:
            biased, bias = zip(*p.logit_bias, strict=True)
            logits[i, _index(np.array(biased), logits)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
        if processors is not None and len(forbidden := processors.forbidden(sequence.tokens)):
            logits[i, _index(forbidden[forbidden < V], logits)] = float("-inf")
        if forbids_stops(sequence, sequence.num_tokens):
            stops = [t for t in p.stop_token_ids if 0 <= t < logits.shape[-1]]
            if sequence.grammar_state is not None:
                stops = list(sequence.grammar_state.stops_to_forbid(stops))
            logits[i, _index(np.array(stops, dtype=np.int64), logits)] = float("-inf")


def restrict(logits: Any, sequences: Sequence[SamplePosition]) -> None:
    """Apply the grammars' masks to ``logits`` [B, V], in place: forbidden tokens get no probability."""
    masked = [(i, s.grammar_state.allowed) for i, s in enumerate(sequences) if s.grammar_state is not None]
    if masked:
        rows, masks = zip(*masked, strict=True)
        allowed = _allowed(np.stack(masks), logits)
        if len(rows) == len(logits):
            logits.masked_fill_(~allowed, float("-inf"))
        else:
            at = constant(rows, torch.int64, logits.device)
            logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(~allowed, float("-inf")))


def _allowed(masks: Any, logits: Any) -> Any:
    """Return bitmasks [B, words] as booleans [B, V] on the device of ``logits``, to which the bits are copied."""
    if logits.device.type == "cpu":
        return torch.from_numpy(unpacked(masks, logits.shape[-1]))
    return unpacked_by_torch(upload(masks.view(np.int32), logits.device), logits.shape[-1])


def unpacked_by_torch(masks: Any, vocab_size: int) -> Any:
    """Do what ``unpacked`` does with int32 [B, words] on a device."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _index(ids: Any, like: Any) -> Any:
    return torch.from_numpy(ids.astype(np.int64)).to(like.device)
