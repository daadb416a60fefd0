"""Whether our Triton kernels run on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any


def on(device: Any) -> bool:
    """On CUDA devices where Triton is installed; tests let its interpreter run them on CPU."""
    return device.type == "cuda" and is_here()


@cache
def is_here() -> bool:
    return find_spec("triton") is not None
