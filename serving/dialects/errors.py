"""What the dialects share in telling errors."""

from __future__ import annotations

import math

from ..errors import ServingError


def retry_headers(error: ServingError) -> dict[str, str]:
    """``Retry-After`` in whole seconds, rounded up: a client that waits less comes too early."""
    if error.retry_after is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
