"""Our contenders are there for our own kernels: where torch's run in their place, there is nothing to measure."""

from __future__ import annotations

import json
from urllib.request import urlopen


def require_native(kernels: str, reason: str) -> None:
    """Raises ``RuntimeError`` unless ``kernels`` are ours; ``reason``: why they are not."""
    if kernels != "native":
        raise RuntimeError(f"our own kernels are to be measured, and {kernels}'s run: {reason}")


def require_served_natively(url: str, endpoint: str) -> None:
    """The same of an endpoint, by what its server says of it."""
    with urlopen(f"{url}/health") as answer:
        state = json.load(answer)["endpoints"][endpoint]
    require_native(state["kernels"], state.get("kernels_reason", ""))
