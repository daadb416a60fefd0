"""Small arrays brought to a device without waiting for what it is doing: a copy from memory that is not page-locked
first waits for everything that was launched before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(array: Any, device: Any) -> Any:
    """A tensor of numpy's ``array`` on ``device``; on CPU it may be the same memory."""
    return to_device(torch.from_numpy(array), device)


def upload_values(values: Sequence[Any], dtype: Any, device: Any) -> Any:
    """A tensor of ``values``, which may be nested."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Any, device: Any) -> Any:
    """A CPU tensor on ``device``. torch keeps page-locked memory until the copy that reads it is done."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
