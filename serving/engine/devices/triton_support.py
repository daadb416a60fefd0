"""Availability of the Triton kernels on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any


def enabled(device: Any) -> bool:
    """Return whether the kernels run on ``device``: on CUDA if Triton is installed. Tests enable its interpreter on
    CPU."""
    return device.type == "cuda" and available()


@cache
def available() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None
