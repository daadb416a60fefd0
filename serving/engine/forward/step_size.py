"""The number of tokens per step if ``max_num_batched_tokens`` is not set, by how fast this machine prefills.

All decoding sequences wait for a step with a prompt in it before they get their next token. Larger steps prefill
faster, because weights are read once per step. So a step takes as many tokens as are prefilled in ``STEP_SECONDS``,
within bounds, and one more for each sequence that may decode beside them: if these alone fill a step, a prompt is read
token by token.

This is measured only if the native step runs on CPU, where a token's logits are bitwise the same in any chunks.
Elsewhere the measurement would influence texts. On CUDA the number follows from what kind of device it is and from the
model's size, which are the same at each start; without native kernels on CPU, a step has ``DEFAULT_TOKENS``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..attention.kv_cache import KVCache, PrefixKey, Row
from ..models.native_decoder import NativeDecoder
from ..models.step_input import StepInput
from ..weights.linear import LinearSet
from .runner import StepForward

STEP_SECONDS = 0.2
DEFAULT_TOKENS = 512
MIN_TOKENS, MAX_TOKENS = 64, 1024  # logits of a step's prompt, if requested, are MAX_TOKENS x vocabulary floats
TOKENS_MULTIPLE = 32
PROBE_TOKENS = 64
MAX_CUDA_TOKENS = 8192
CUDA_EFFICIENCY = 0.4  # of the matrix units, by a step with a prompt
MAX_LOGITS_FRACTION = 1 / 16  # of the device's memory, if all logits of a step's prompt are requested
PRODUCTS_PER_CYCLE = {7: 512, 8: 512, 9: 2048}  # of 16-bit numbers by a multiprocessor, by major compute capability
A100_PRODUCTS_PER_CYCLE = 1024  # 8.0; 8.6 and 8.9 have half as many
NEWER_PRODUCTS_PER_CYCLE = 4096  # from 10.0 on
MAX_PROBES = 4  # the fastest counts, since other processes may use the CPUs
MAX_PROBE_SECONDS = 0.1  # of all probes, after which no further one starts
_OWNER = -1  # not a sequence's id


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """The properties of a CUDA device that say how fast it prefills."""

    capability: tuple[int, int]
    num_multiprocessors: int
    clock_hz: float
    memory: int

    @classmethod
    def of(cls, device: Any) -> CudaDevice:
        found = torch.cuda.get_device_properties(device)
        clock = float(getattr(found, "clock_rate", 0)) * 1e3 or 1.5e9  # older versions of torch do not tell
        return cls((found.major, found.minor), found.multi_processor_count, clock, found.total_memory)

    @property
    def products_per_second(self) -> float:
        if self.capability == (8, 0):
            each = A100_PRODUCTS_PER_CYCLE
        else:
            each = PRODUCTS_PER_CYCLE.get(self.capability[0], NEWER_PRODUCTS_PER_CYCLE)
        return each * self.num_multiprocessors * self.clock_hz


def products_per_token(model: Any, linears: LinearSet, config: Any) -> int:
    """Return the products of a prompt's token: with each linear but the output head, and with its experts."""
    shapes = (shape for name, shape in linears.shapes.items() if name != linears.head)
    stacked = [weight for weight in model.parameters() if weight.dim() == 3]
    chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
    return sum(map(math.prod, shapes)) + chosen * sum(weight.numel() // len(weight) for weight in stacked)


def cuda_step_size(device: CudaDevice, products_per_token: int, vocab_size: int) -> int:
    """Return the tokens of a step on CUDA, a power of two from ``DEFAULT_TOKENS`` to ``MAX_CUDA_TOKENS``, for a model
    that multiplies ``products_per_token`` numbers for each token."""
    in_time = STEP_SECONDS * CUDA_EFFICIENCY * device.products_per_second / max(products_per_token, 1)
    in_memory = MAX_LOGITS_FRACTION * device.memory / (4 * vocab_size)
    fitting = int(min(in_time, in_memory, MAX_CUDA_TOKENS))
    return 1 << (max(fitting, DEFAULT_TOKENS).bit_length() - 1)


def step_size(
    forward: StepForward,
    cache: KVCache,
    vocab_size: int,
    max_num_seqs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the tokens of a step on CPU. ``cache`` must have no running sequences, and has none afterwards."""
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
