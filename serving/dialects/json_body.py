"""JSON bodies: from bytes, with errors that name the field wherever there is one to name, and to bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..errors import InvalidField, RequestError
from ..readers import string

MAX_REREAD = 1 << 20  # bytes of a broken body that are read once more, for the field's name
PATH_END = 128  # characters of a path that are shown at each end
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


class _KeyTwice(Exception):
    pass


class _Twice(Struct):
    """Stands for an object that has the key twice."""

    name: str
    value: Any


def _check_keys(body: bytes) -> None:
    """Raises ``InvalidField`` for a key that an object has twice: parsers differ in which of the two they take, and so
    would whoever looked at the request before us. The body is known to be JSON."""
    try:
        try:
            json.loads(body, object_pairs_hook=_each_once)
            return
        except _KeyTwice:
            found = json.loads(body, object_pairs_hook=_marked)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deeper than this parser goes
        raise RequestError(f"body: {str(error)[:120]}", param="body") from None
    path, twice = next((path, value) for path, value in _within(found) if isinstance(value, _Twice))
    raise InvalidField(_shown(_joined(path, twice.name)), twice.value, "one value: the key is there twice")


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    """Of an object nothing is kept: most have no such key."""
    if len(dict(pairs)) != len(pairs):
        raise _KeyTwice


def _marked(pairs: list[tuple[str, Any]]) -> Any:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            return _Twice(name, value)
        found[name] = value
    return found


def _within(found: Any) -> Iterator[tuple[str, Any]]:
    """All values in the order in which they stand, with their paths; lists and objects before what is in them."""
    waiting = [("", found)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            waiting += reversed([(_joined(path, name), entry) for name, entry in value.items()])
        elif isinstance(value, list):
            waiting += reversed([(f"{path}[{place}]", entry) for place, entry in enumerate(value)])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name[:64]}" if path else name[:64]


def _shown(path: str) -> str:
    """Of a path without end its ends."""
    return path if len(path) <= 2 * PATH_END else f"{path[:PATH_END]}…{path[-PATH_END:]}"


def leniently(body: bytes) -> Any:
    """What the standard library makes of a body that is no JSON for its values alone: NaN, half a surrogate pair, bytes
    that are no UTF-8, a number beyond all bounds. None for what is no JSON otherwise, or long."""
    if len(body) > MAX_REREAD:
        return None
    try:
        return json.loads(body.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _reread(body: bytes, read: Callable[[dict[str, Any]], object]) -> None:
    """Raises ``InvalidField`` where a field's value is what is wrong (``leniently``): ``read`` refuses it by name, or,
    in a field that is free in what it holds, its place is looked for."""
    found = leniently(body)
    if not isinstance(found, dict):
        return
    read(found)
    for path, value in _within(found):
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidField(_shown(path), value, "a finite number")
        for text in value if isinstance(value, dict) else [value] if isinstance(value, str) else []:
            string(text, _shown(path))


def json_bytes(value: Any) -> bytes:
    """Entries of long lists one by one: in one call a thousand vectors would keep all other threads waiting."""
    if isinstance(value, dict):
        value = {key: _entries(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    return _encoder.encode(value)


def _entries(value: list[Any]) -> Any:
    if len(value) <= MANY:
        return value
    return msgspec.Raw(b"[" + b",".join([_encoder.encode(entry) for entry in value]) + b"]")
