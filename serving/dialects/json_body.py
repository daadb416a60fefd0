"""Read and write JSON bodies; errors name the field wherever possible."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from ..interface.errors import InvalidField, RequestError
from ..interface.readers import string
from ..system.imports import Lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")

MAX_REREAD = 1 << 20  # bytes of an invalid body that is parsed again to find the name of the field
PATH_END_CHARACTERS = 128  # characters of a path that are shown at each end
MAX_ENTRIES_AT_ONCE = 16  # entries of a list; longer ones are encoded one entry at a time
MAX_OBJECTS = 200_000  # objects, lists and keys: a call makes or frees a million in a second, and no stream goes on

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


def read_object(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """Return ``read`` of the JSON object in ``body``. Raises ``RequestError`` for no object, and what ``read`` does."""
    check_objects(body)
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _reread(body, read)
        reason = str(error).split(" - at ")[0][:120]
        raise RequestError(f"body: expected a JSON object ({reason})", param="body") from None
    if not isinstance(found, dict):
        raise InvalidField("body", found, "a JSON object")
    if body.count(b":") > len(found):  # otherwise every colon belongs to a key in ``found``
        _check_keys(body)
    return read(found)


def check_objects(body: bytes) -> None:
    """Raise ``RequestError`` for more than ``MAX_OBJECTS`` in a JSON text, before they are made."""
    if body.count(b"{") + body.count(b"[") + body.count(b":") <= MAX_OBJECTS:
        return
    if b"\\" in body:
        body = body.replace(rb"\\", b"..").replace(rb"\"", b"..")
    array = np.frombuffer(body, np.uint8)
    outside = np.cumsum(array == ord('"'), dtype=np.uint8) & 1 == 0
    count = sum(int(np.count_nonzero((array == ord(mark)) & outside)) for mark in "{[:")
    if count > MAX_OBJECTS:
        text = f"body: {count:,} objects, lists and keys are too many; at most {MAX_OBJECTS:,} are allowed"
        raise RequestError(text, param="body")


class _KeyTwice(Exception):
    pass


class _Twice(Struct):
    """A stand-in for an object that has the key ``name`` twice."""

    name: str
    value: Any


def _check_keys(body: bytes) -> None:
    """Raise ``InvalidField`` if an object has a key twice. The body is known to be JSON.

    Parsers differ in which of the two values they use, so a proxy before this server may have checked the other one.
    """
    try:
        try:
            json.loads(body, object_pairs_hook=_each_once)
            return
        except _KeyTwice:
            found = json.loads(body, object_pairs_hook=_marked)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nested too deeply
        raise RequestError(f"body: {str(error)[:120]}", param="body") from None
    path, twice = next((path, value) for path, value in _within(found) if isinstance(value, _Twice))
    raise InvalidField(_shown(_joined(path, twice.name)), twice.value, "one value: the key is there twice")


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    """Raise ``_KeyTwice`` for a duplicate key. Values are not kept, because most bodies have no duplicate key."""
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
    """Yield all values with their paths, in document order; a list or an object comes before its contents."""
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
    """Shorten a very long path to its beginning and its end."""
    return (
        path if len(path) <= 2 * PATH_END_CHARACTERS else f"{path[:PATH_END_CHARACTERS]}…{path[-PATH_END_CHARACTERS:]}"
    )


def leniently(body: bytes) -> Any:
    """Parse, with the standard library, a body whose structure is JSON but whose values are not.

    Such values are NaN, half a surrogate pair, bytes that are not UTF-8, and numbers out of range. Returns None for a
    body that is otherwise not JSON, or longer than ``MAX_REREAD``.
    """
    if len(body) > MAX_REREAD:
        return None
    try:
        return json.loads(body.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _reread(body: bytes, read: Callable[[dict[str, Any]], object]) -> None:
    """Raise ``InvalidField`` if a field's value is what makes the body invalid (``leniently``).

    ``read`` refuses the field by name. In a field that accepts any content, the path of the value is searched for.
    """
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
    """Encode an object. Entries of long lists are encoded one by one: encoding a thousand vectors in one call would
    block all other threads."""
    if isinstance(value, dict):
        value = {key: _entries(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    return _encoder.encode(value)


def _entries(value: list[Any]) -> Any:
    if len(value) <= MAX_ENTRIES_AT_ONCE:
        return value
    return msgspec.Raw(b"[" + b",".join([_encoder.encode(entry) for entry in value]) + b"]")
