"""JSON bodies: from bytes, with errors that name the field wherever there is one to name, and to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import InvalidField, RequestError

MAX_REREAD = 1 << 20  # bytes of a broken body that are read once more, for the field's name
MANY = 16  # entries of a list

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


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
    if body.count(b":") > len(found):  # else there is no key beside those that were found
        _check_keys(body)
    return read(found)


def _check_keys(body: bytes) -> None:
    """Raises ``InvalidField`` for a key that an object has twice: parsers differ in which of the two they take, and so
    would whoever looked at the request before us. The body is known to be JSON."""
    try:
        json.loads(body, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deeper than this parser goes
        raise RequestError(f"body: {str(error)[:120]}", param="body") from None


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen:
            raise InvalidField(name[:64], value, "one value: the key is there twice")
        seen.add(name)


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


def json_bytes(value: Any) -> bytes:
    """Entries of long lists one by one: in one call a thousand vectors would keep all other threads waiting."""
    if isinstance(value, dict):
        value = {key: _entries(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    return _encoder.encode(value)


def _entries(value: list[Any]) -> Any:
    if len(value) <= MANY:
        return value
    return msgspec.Raw(b"[" + b",".join([_encoder.encode(entry) for entry in value]) + b"]")
