"""Availability of the Triton kernels on a device, and the trial of a kernel beside its reference."""

from __future__ import annotations

from collections.abc import Callable
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


def why_disabled(device: Any) -> str:
    """Return why the kernels do not run on ``device``; "" if they do."""
    if enabled(device):
        return ""
    return "Triton is not installed" if device.type == "cuda" else "there is no CUDA device"


def why_wrong(compute: Callable[[], Any], reference: Callable[[], Any], tolerance: float, name: str) -> str:
    """Return why the kernel ``name`` is not to be used, by an example: a device's compiler may be missing, or wrong.

    "" if what it computes is at most ``tolerance``, relative to the largest value, from what ``reference`` gives."""
    try:
        found, wanted = compute().float(), reference().float()
    except Exception as error:  # from Triton's compiler, the C compiler that it needs, or the driver
        return f"{name} does not run: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    distance = float((found - wanted).abs().max() / wanted.abs().max())
    return "" if distance <= tolerance else f"{name} differs from the reference by {distance:.2g}"
