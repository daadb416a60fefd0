"""What the dialects share in telling errors."""

from __future__ import annotations

import math

from ..errors import ServingError

MAX_RETRY_AFTER = 60  # clients sleep as long as they are told, some without a bound: a month's budget would be days


def retry_headers(error: ServingError) -> dict[str, str]:
    """``Retry-After`` in whole seconds, rounded up: a client that waits less comes too early. ``MAX_RETRY_AFTER`` at
    most."""
    if error.retry_after is None:
        return {}
    return {"Retry-After": str(min(MAX_RETRY_AFTER, max(1, math.ceil(error.retry_after))))}
