"""The least time that a step can take on a device: its copies and matrix products, and what a model reads and
computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Give cached memory back to the device."""
    import torch

    if device != "cpu":
        torch.cuda.empty_cache()


def best_seconds(device: str, run: Callable[[], Any], repeats: int = 8) -> float:
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def copy_speed(device: str) -> float:
    """Return the bytes per second that the device reads and writes: the best of several copies of a large tensor."""
    import torch

    size = 1 << (24 if device == "cpu" else 30)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(device, lambda: target.copy_(source))


def matrix_rate(device: str) -> float:
    """Return the operations per second of a large product of random matrices (bfloat16; float32 on a CPU)."""
    import torch

    size, dtype = (256, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(device, lambda: one @ other)


def linears_of(config: Any) -> int:
    """Return the number of weights of all linear layers but the head."""
    hidden = config.hidden_size
    width = hidden // config.num_attention_heads * config.num_key_value_heads
    layer = 2 * hidden * hidden + 2 * hidden * width + 3 * hidden * config.intermediate_size
    return int(config.num_hidden_layers * layer)


def floor_seconds(
    config: Any, itemsize: int, count: int, length: float, speed: float, linear_itemsize: int | None = None
) -> float:
    """Return the min time of a step: reading all weights of linears and the head, and ``length`` tokens' keys and
    values of each sequence. ``linear_itemsize``: bytes of a linear's number, if different."""
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    kv = count * length * 2 * width * config.num_hidden_layers
    linears = linears_of(config) * (linear_itemsize or itemsize)
    return float((linears + (config.hidden_size * config.vocab_size + kv) * itemsize) / speed)


def prefill_operations(config: Any, count: int, length: int) -> float:
    """Return the operations of ``count`` prompts: two a weight and token, and causal attention."""
    attention = 2 * length * length * config.hidden_size * config.num_hidden_layers  # half of 4: only earlier tokens
    head = 2 * config.hidden_size * config.vocab_size  # of the last token
    return float(count * (2 * linears_of(config) * length + attention + head))
