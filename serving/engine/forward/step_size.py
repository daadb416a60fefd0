"""How many tokens a step takes, where ``max_num_batched_tokens`` does not say: by how fast this machine prefills.

A step with a prompt in it is how long all sequences that decode wait for their next token. Larger ones prefill faster,
because weights are read once a step. So a step takes as many tokens as are prefilled in ``SECONDS``, within bounds, and
one more for each sequence that may decode beside them: where these alone fill a step, a prompt is read token by token.

Only where the native step runs on CPU: there a token's logits are the same in any chunks, bit for bit. Elsewhere what a
machine happened to measure would show in texts, and a step has ``DEFAULT`` tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..attention.kv_cache import KVCache, PrefixKey, Row
from ..models.native_decoder import NativeDecoder
from .runner import StepForward

SECONDS = 0.2
DEFAULT = 512
LEAST, MOST = 64, 1024  # logits of a step's whole prompt, where they are asked for, are MOST x vocabulary floats
UNIT = 32
PROBE = 64  # tokens
TRIES = 4  # of which the fastest counts: others may use the processors
ENOUGH = 0.1  # seconds of tries, after which there is no further one
_OWNER = -1  # no sequence's


def step_size(
    forward: StepForward,
    cache: KVCache,
    vocab_size: int,
    max_num_seqs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Tokens of a step. ``cache`` has no running sequences, and has none afterwards."""
    num_tokens = min(PROBE, cache.max_model_len, cache.num_tokens_total)
    if not isinstance(forward, NativeDecoder) or num_tokens < PROBE:
        return DEFAULT
    tokens = (np.arange(num_tokens, dtype=np.int32) * 7919) % vocab_size
    if cache.acquire(_OWNER, PrefixKey("", "step size"), tokens) is None:
        return DEFAULT
    try:
        seconds = _fastest(
            lambda: forward.forward(tokens.astype(np.int64), [Row(_OWNER, 0, num_tokens)], [None], [0]), clock
        )
    finally:
        cache.release(_OWNER, keep=False)
    return within(seconds / num_tokens) + max_num_seqs


def within(seconds: float) -> int:
    """Tokens of prompts in a step, a multiple of ``UNIT``, where each takes ``seconds``."""
    fitting = int(min(SECONDS / max(seconds, 1e-9), MOST))
    return max(fitting // UNIT * UNIT, LEAST)


def _fastest(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    found: list[float] = []
    while len(found) < TRIES and sum(found) < ENOUGH:
        began = clock()
        run()
        found.append(clock() - began)
    return min(found)
