"""Asynchronous host-to-device copies through pinned memory. A copy from pageable memory would first wait for everything
launched before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch


def upload(array: Any, device: Any) -> Any:
    """Return numpy's ``array`` as a tensor on ``device``; on CPU it may share the memory."""
    return to_device(torch.from_numpy(array), device)


def upload_values(values: Sequence[Any], dtype: Any, device: Any) -> Any:
    """Return ``values``, which may be nested, as a tensor on ``device``."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Any, device: Any) -> Any:
    """Copy a CPU tensor to ``device``. torch keeps pinned memory until the copy that reads it is done."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def staging(size: int, dtype: Any, device: Any) -> Any:
    """Return a CPU tensor [size] to be filled and copied to ``device`` without waiting: pinned, for CUDA. torch reuses
    its memory once the copy is done."""
    return torch.empty(size, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


@lru_cache(maxsize=256)
def constant(values: tuple[Any, ...], dtype: Any, device: Any) -> Any:
    """Return ``values`` as ``upload_values`` does, as a tensor that later calls share: it must not be written.

    What is the same in every step of a batch is then uploaded once."""
    return upload_values(values, dtype, device)
