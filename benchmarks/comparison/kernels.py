"""Checks that our contenders run on native kernels: measuring torch's in their place would be meaningless."""

from __future__ import annotations

import json
from urllib.request import urlopen


def require_native(kernels: str, reason: str) -> None:
    """Raise ``RuntimeError`` unless ``kernels`` are native, with the ``reason``."""
    if kernels != "native":
        raise RuntimeError(f"our own kernels are to be measured, and {kernels}'s run: {reason}")


def require_served_natively(url: str, endpoint: str) -> None:
    """Raise ``RuntimeError`` unless the server reports native kernels of an endpoint."""
    with urlopen(f"{url}/health") as answer:
        state = json.load(answer)["endpoints"][endpoint]
    require_native(state["kernels"], state.get("kernels_reason", ""))
