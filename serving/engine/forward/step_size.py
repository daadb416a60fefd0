"""The number of tokens per step if ``max_num_batched_tokens`` is not set, by how fast this machine prefills.

All decoding sequences wait for a step with a prompt in it before they get their next token. Larger steps prefill
faster, because weights are read once per step. So a step takes as many tokens as are prefilled in ``STEP_SECONDS``,
within bounds, and one more for each sequence that may decode beside them: if these alone fill a step, a prompt is read
token by token.

This is measured only if the native step runs on CPU, where a token's logits are bitwise the same in any chunks.
Elsewhere the measurement would influence texts, and a step has ``DEFAULT_TOKENS``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..attention.kv_cache import KVCache, PrefixKey, Row
from ..models.native_decoder import NativeDecoder
from ..models.step_input import StepInput
from .runner import StepForward

STEP_SECONDS = 0.2
DEFAULT_TOKENS = 512
MIN_TOKENS, MAX_TOKENS = 64, 1024  # logits of a step's prompt, if requested, are MAX_TOKENS x vocabulary floats
TOKENS_MULTIPLE = 32
PROBE_TOKENS = 64
MAX_PROBES = 4  # the fastest counts, since other processes may use the CPUs
MAX_PROBE_SECONDS = 0.1  # of all probes, after which no further one starts
_OWNER = -1  # not a sequence's id


def step_size(
    forward: StepForward,
    cache: KVCache,
    vocab_size: int,
    max_num_seqs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the tokens of a step. ``cache`` must have no running sequences, and has none afterwards."""
    num_tokens = min(PROBE_TOKENS, cache.max_model_len, cache.num_tokens_total)
    if not isinstance(forward, NativeDecoder) or num_tokens < PROBE_TOKENS:
        return DEFAULT_TOKENS
    tokens = (np.arange(num_tokens, dtype=np.int32) * 7919) % vocab_size
    if cache.acquire(_OWNER, PrefixKey("", "step size"), tokens) is None:
        return DEFAULT_TOKENS
    try:
        step = StepInput(tokens.astype(np.int64), [Row(_OWNER, 0, num_tokens)], [None], [0])
        seconds = _fastest(lambda: forward.forward(step), clock)
    finally:
        cache.release(_OWNER, keep=False)
    return tokens_for(seconds / num_tokens) + max_num_seqs


def tokens_for(seconds: float) -> int:
    """Return the prompt tokens of a step, a multiple of ``TOKENS_MULTIPLE``, if each takes ``seconds``."""
    fitting = int(min(STEP_SECONDS / max(seconds, 1e-9), MAX_TOKENS))
    return max(fitting // TOKENS_MULTIPLE * TOKENS_MULTIPLE, MIN_TOKENS)


def _fastest(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    found: list[float] = []
    while len(found) < MAX_PROBES and sum(found) < MAX_PROBE_SECONDS:
        began = clock()
        run()
        found.append(clock() - began)
    return min(found)
