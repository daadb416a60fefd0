"""The trial of the sampling kernels beside torch, at load: a device's compiler may be missing, or wrong.

It also compiles them, so that no request waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...interface.request import Sampling
from ..devices.transfers import upload_values
from ..devices.triton_support import why_wrong
from . import device_sampling
from .adjustment import penalize, penalize_by_torch
from .randomness import exponentials
from .sampler import race, truncate, typical
from .top_logits import top_logits

logger = logging.getLogger(__name__)
ROWS = 3
SEEDS, POSITIONS = [5, 1 << 63, 7], [3, 400, 70_000]
LAST_BITS = 1e-4
LIMITED = [Sampling(max_tokens=1, temperature=t, top_k=k, top_p=0.9) for t, k in ((0.7, 5), (1.0, 50), (1.5, 30))]
TYPICAL = [
    Sampling(max_tokens=1, temperature=t, top_p=p, typical_p=q)
    for t, p, q in ((0.7, 0.5, 1), (1, 0.9, 0.8), (1.5, 1, 0.5))
]
WHOLE = [Sampling(max_tokens=1, temperature=t, min_p=m) for t, m in ((0.7, 0.0), (1.0, 0.1), (1.5, 0.0))]


def try_kernels(vocab_size: int, dtype: Any, device: Any) -> None:
    """Run the sampling kernels of a device on random logits of this width and type.

    If one is wrong, the device samples by torch, and the log says why."""
    device = torch.empty(0, device=device).device  # with its number
    if not device_sampling.is_offered(device):
        return
    for name, compute, reference, tolerance in _trials(vocab_size, dtype, device):
        reason = why_wrong(compute, reference, tolerance, name)
        if reason:
            logger.warning("tokens are sampled by torch: %s", reason)
            device_sampling.refuse(device, reason)
            return


Trial = tuple[str, Callable[[], Any], Callable[[], Any], float]


def _trials(vocab_size: int, dtype: Any, device: Any) -> list[Trial]:
    generator = torch.Generator().manual_seed(0)
    distinct = (3 * torch.randn(ROWS, vocab_size, generator=generator)).to(device)  # without ties, unlike bfloat16
    logits = distinct.to(dtype)
    floats = logits.float()
    times = exponentials(SEEDS, POSITIONS, vocab_size).to(device)
    words = torch.randint(0, 5, (ROWS, vocab_size), generator=generator, dtype=torch.int32).to(device)
    slots = upload_values([2, -1, 0], torch.int64, device)
    penalties = upload_values([[1.3, 0.2, 0.1], [1.0, 0.0, 0.0], [0.8, -0.5, 0.3]], torch.float32, device)
    few = min(20, vocab_size)
    ids = torch.randint(0, vocab_size, (ROWS, few), generator=generator).to(device)

    def limited() -> Any:
        scaled = distinct / upload_values([[p.temperature] for p in LIMITED], torch.float32, device)
        values, order = scaled.topk(min(50, vocab_size))
        weights = truncate(values, torch.logsumexp(scaled, -1, keepdim=True), LIMITED)
        return order.gather(1, race(weights, times.gather(1, order))[:, None])[:, 0]

    def typical_ones() -> Any:
        scaled = distinct / upload_values([[p.temperature] for p in TYPICAL], torch.float32, device)
        weights, order = typical(scaled, TYPICAL)
        return order.gather(1, race(weights, times.gather(1, order))[:, None])[:, 0]

    def whole() -> Any:
        weights = torch.softmax(floats / upload_values([[p.temperature] for p in WHOLE], torch.float32, device), -1)
        least = upload_values([[p.min_p] for p in WHOLE], torch.float32, device)
        return race(weights.masked_fill(weights < weights.amax(-1, keepdim=True) * least, 0.0), times)

    return [
        ("the sum of a row", lambda: top_logits(logits, few).totals, lambda: torch.logsumexp(floats, -1), LAST_BITS),
        ("the largest logits", lambda: top_logits(logits, few).values, lambda: floats.topk(few).values, 0.0),
        (
            "the token of the largest logits",
            lambda: floats.gather(1, top_logits(logits, few).ids),
            lambda: floats.topk(few).values,
            0.0,
        ),
        (
            "random times",
            lambda: device_sampling.exponentials(SEEDS, POSITIONS, vocab_size, device),
            lambda: times,
            LAST_BITS,
        ),
        (
            "random times of some tokens",
            lambda: device_sampling.exponentials_at(ids, SEEDS, POSITIONS),
            lambda: times.gather(1, ids),
            LAST_BITS,
        ),
        (
            "drawing from all tokens",
            lambda: device_sampling.race(logits, floats.amax(-1), WHOLE, SEEDS, POSITIONS),
            whole,
            0.0,
        ),
        (
            "drawing from all adjusted tokens",
            lambda: device_sampling.race(floats, floats.amax(-1), WHOLE, SEEDS, POSITIONS),
            whole,
            0.0,
        ),
        (
            "drawing from typical tokens",
            lambda: device_sampling.race(distinct, distinct.amax(-1), TYPICAL, SEEDS, POSITIONS),
            typical_ones,
            0.0,
        ),
        (
            "drawing from the largest logits",
            lambda: device_sampling.race_limited(distinct, LIMITED, SEEDS, POSITIONS),
            limited,
            0.0,
        ),
        (
            "penalties",
            lambda: penalize(logits, words, slots, penalties),
            lambda: penalize_by_torch(logits, words, slots, penalties),
            LAST_BITS,
        ),
    ]
