"""A sequence's sampling as vLLM's ``SamplingParams``.

The engine itself ends a sequence by its ``StopRule``, which counts resumed tokens and knows stop sequences. By the
race, vLLM gets no stop tokens and only takes the largest logit; sampling by itself, it needs them for ``min_tokens``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..constraints.logits_processors import may_forbid
from .options import VllmSettings
from .sequences import VllmSequence
from .shared import ARGUMENT


def parameters(sequence: VllmSequence, own: VllmSettings) -> Any:
    """Return the ``SamplingParams`` of a sequence that goes on."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, rule = sequence.sampling, sequence.stop_rule
    assert sampling is not None
    assert rule is not None
    common: dict[str, Any] = {
        "max_tokens": max(rule.max_tokens - len(sequence.generated), 1),
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "ignore_eos": True,
        "detokenize": False,
        "output_kind": RequestOutputKind.DELTA,
        "skip_clone": True,
    }
    if own.sampling == "race":
        extra = {ARGUMENT: _draw(sequence)} if needs_race(sequence) else None
        return SamplingParams(temperature=0.0, extra_args=extra, **common)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=sequence.seed % 2**63,
        min_tokens=max(min(sampling.min_tokens - len(sequence.generated), common["max_tokens"]), 0),
        stop_token_ids=list(sampling.stop_token_ids),
        **common,
    )


def needs_race(sequence: VllmSequence) -> bool:
    """Return whether a sequence's tokens may differ from those with the largest logits."""
    s = sequence.sampling
    assert s is not None
    changed = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0 or s.logit_bias
    banned = may_forbid(s) or s.grammar is not None or (s.min_tokens > 0 and s.stop_token_ids)
    return s.temperature != 0.0 or bool(changed) or bool(banned)


def _draw(sequence: VllmSequence) -> bytes:
    from .race import Draw

    assert sequence.sampling is not None
    draw = Draw(sequence.key, sequence.sampling, sequence.seed, len(sequence.prompt), sequence.room)
    return msgspec.msgpack.encode(draw)
