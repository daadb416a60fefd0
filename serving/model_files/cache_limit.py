"""The bounds of the parts of the cache, which users set in the environment."""

from __future__ import annotations

import os

from ..interface.errors import PackagingError
from ..system.sizes import EXAMPLES, bytes_of

DEFAULT_LIMIT = 100 * 1000**3


def limit_of(variable: str) -> int:
    """Return the number of bytes that an environment variable allows a part of the cache. Raises ``PackagingError``."""
    given = os.environ.get(variable)
    if not given:
        return DEFAULT_LIMIT
    size = bytes_of(given)
    if size is None:
        raise PackagingError(f"{variable}: {given!r} is not a number of bytes, such as {EXAMPLES}")
    return size
