"""A request's body, from bytes to what reads it, with errors that name the field wherever there is one to name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import InvalidField, RequestError

MAX_REREAD = 1 << 20  # bytes of a broken body that are read once more, for the field's name

T = TypeVar("T")


def read_object(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """What ``read`` makes of the JSON object in ``body``. Raises what it raises; ``RequestError`` for no object."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _reread(body, read)
        reason = str(error).split(" - at ")[0][:120]
        raise RequestError(f"body: expected a JSON object ({reason})", param="body") from None
    if not isinstance(found, dict):
        raise InvalidField("body", found, "a JSON object")
    return read(found)


def _reread(body: bytes, read: Callable[[dict[str, Any]], object]) -> None:
    """Raises ``InvalidField`` where a field's value is what is wrong: half a surrogate pair, bytes that are no UTF-8, a
    number beyond all bounds. The standard library takes these for values, and ``read`` then refuses them by name."""
    if len(body) > MAX_REREAD:
        return
    try:
        found = json.loads(body.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        read(found)
