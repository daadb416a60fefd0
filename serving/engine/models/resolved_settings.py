"""The meaning of an engine's settings on this machine: "auto" and null become a device, a dtype and a block size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...interface.errors import PackagingError
from ...interface.settings import EngineSettings

BLOCK_SIZE = 16  # tokens in a block of the KV cache on CUDA


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings of an engine with what they mean here, resolved once when its model is loaded.

    ``block_size`` is the number of tokens in a block of the KV cache; None for slots."""

    settings: EngineSettings
    device: Any
    dtype: Any
    block_size: int | None

    @classmethod
    def of(cls, settings: EngineSettings | ResolvedSettings) -> ResolvedSettings:
        """Resolve settings, unless they are resolved. Raises ``PackagingError`` for those that this machine lacks."""
        if isinstance(settings, ResolvedSettings):
            return settings
        device = resolve_device(settings)
        return cls(settings, device, _dtype(settings, device), _block_size(settings, device))


def resolve_device(settings: EngineSettings) -> Any:
    """Return the device of ``settings.device``. Raises ``PackagingError`` if this machine or this torch lacks it."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = f"this machine's torch finds {torch.cuda.device_count()} CUDA devices"
        why = there if torch.backends.cuda.is_built() else "this torch was built without CUDA"
        raise PackagingError(f"device: {settings.device!r} is not allowed; expected an available device: {why}")
    return device


def _block_size(settings: EngineSettings, device: Any) -> int | None:
    if device.type != "cpu":
        return settings.kv_block_size or BLOCK_SIZE
    if settings.kv_block_size is not None and settings.kernels == "auto":
        allowed = "expected null on CPU with kernels auto: our own kernels read slots (kernels: torch takes blocks)"
        raise PackagingError(f"kv_block_size: {settings.kv_block_size} is not allowed; {allowed}")
    return settings.kv_block_size


def _dtype(settings: EngineSettings, device: Any) -> Any:
    """Return the torch dtype; "auto" is float32 on CPU and bfloat16 elsewhere."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, settings.dtype)
