"""Readers of values: each reads one kind of value and has the JSON schema of the values it accepts.

A reader is called with ``(value, path)`` and returns the value in the raw request's form, or raises ``InvalidField``
with the path (``messages[2].content``), the value and what is allowed. JSON's types are kept apart: true is not 1, "1"
is not 1, and NaN and Infinity are not numbers. 2.0 counts as an integer, as in JSON Schema, since some clients have
only floats. No reader accepts null: the table or record decides what null means.

msgspec's constrained types are not used: they refuse 2.0, cannot bound a uint64 (``seed``), and take four times as long
per value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from .errors import InvalidField

INT64 = 2**63
UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1
MAX_DEPTH = 64

T = TypeVar("T")
JSON_TYPES = {str: "string", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Reader(Generic[T]):
    """A function ``read`` and the JSON ``schema`` that tells callers what it accepts; a test compares the two."""

    read: Callable[[Any, str], T]
    schema: Mapping[str, Any]

    def __call__(self, value: Any, path: str) -> T:
        return self.read(value, path)


def reader(**schema: Any) -> Callable[[Callable[[Any, str], T]], Reader[T]]:
    """Decorate a function that reads a value, giving it a schema."""
    return lambda read: Reader(read, schema)


@reader(type="boolean")
def boolean(value: Any, path: str) -> bool:
    """Read true or false; 0, 1 and texts are not accepted."""
    if not isinstance(value, bool):
        raise InvalidField(path, value, "true or false")
    return value


def integer(low: int, high: int) -> Reader[int]:
    """Return a reader of an integer in [low, high]."""

    @reader(type="integer", minimum=low, maximum=high)
    def read(value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidField(path, value, f"an integer in [{low}, {high}]")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader[float]:
    """Return a reader of a finite number in [low, high]; ``above`` excludes ``low`` itself."""
    allowed = f"a number in {'(' if above else '['}{low:g}, {high:g}]"

    @reader(type="number", **{"exclusiveMinimum" if above else "minimum": low}, maximum=high)
    def read(value: Any, path: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidField(path, value, allowed)
        inside = low < value <= high if above else low <= value <= high  # NaN compares false
        if not inside:
            raise InvalidField(path, value, allowed)
        return float(value)

    return read


@reader(type="string")
def string(value: Any, path: str) -> str:
    """Read a text that UTF-8 can encode: JSON escapes can spell half a surrogate pair, which no tokenizer accepts."""
    if not isinstance(value, str):
        raise InvalidField(path, value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidField(path, value, "valid Unicode text without lone surrogates") from None
    return value


def short_text(maximum: int) -> Reader[str]:
    """Return a reader of a text of 1 to ``maximum`` characters."""

    @reader(type="string", minLength=1, maxLength=maximum)
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= maximum:
            raise InvalidField(path, value, f"a text of 1 to {maximum} characters")
        return string(value, path)

    return read


def text(pattern: re.Pattern[str], allowed: str) -> Reader[str]:
    """Return a reader of a text that matches ``pattern`` as a whole."""

    @reader(type="string", pattern=f"^({pattern.pattern})$")
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise InvalidField(path, value, allowed)
        return string(value, path)

    return read


def one_of(*options: Any, why: str = "") -> Reader[Any]:
    """Return a reader of one of the given values. If they all mean what null does, ``why`` says why no other is
    allowed."""
    listed = ", ".join(json.dumps(option) for option in options)
    allowed = f"one of null, {listed}: {why}" if why else f"one of {listed}"
    kinds = list(dict.fromkeys(JSON_TYPES[type(option)] for option in options))

    @reader(type=kinds[0] if len(kinds) == 1 else kinds, enum=list(options))
    def read(value: Any, path: str) -> Any:
        if not any(type(value) is type(option) and value == option for option in options):
            raise InvalidField(path, value, allowed)
        return value

    return read


def refused(why: str) -> Reader[Any]:
    """Return a reader that accepts no value, for a field that is known but may only be null."""

    @reader(type="null")
    def read(value: Any, path: str) -> Any:
        raise InvalidField(path, value, f"null: {why}")

    return read


@reader(type="object")
def obj(value: Any, path: str) -> dict[str, Any]:
    """Read an object of any content, at most ``MAX_DEPTH`` levels deep: templates and other code recurse into it."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidField(path, value, "an object")
    if not is_shallow(value):
        raise InvalidField(path, value, f"an object of at most {MAX_DEPTH} levels")
    return value


def is_shallow(value: Any) -> bool:
    """Return whether objects and lists are nested at most ``MAX_DEPTH`` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = chain.from_iterable(entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for entry in inside if isinstance(entry, dict | list | tuple)]
        if not level:
            return True
    return False


def list_of(item: Reader[T], allowed: str, *, minimum: int = 0, maximum: float = math.inf) -> Reader[tuple[T, ...]]:
    """Return a reader of a list of ``minimum`` to ``maximum`` entries, each read by ``item`` at its own path.

    ``allowed`` says in words what is allowed.
    """
    bounds = ({"minItems": minimum} if minimum else {}) | ({"maxItems": maximum} if maximum < math.inf else {})

    @reader(type="array", items=item.schema, **bounds)
    def read(value: Any, path: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or not minimum <= len(value) <= maximum:
            raise InvalidField(path, value, allowed)
        return tuple(item(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    return read


def any_of(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of values that any of ``schemas`` accepts."""
    return {"anyOf": list(schemas)}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of values that ``schema`` accepts, or null."""
    return any_of(schema, {"type": "null"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a record. ``required`` says what is expected if the field is missing."""

    read: Reader[Any]
    description: str = ""
    required: str = ""


def record(**entries: Entry) -> Reader[dict[str, Any]]:
    """Return a reader of an object with these fields; it returns those given, as read. Null means the default."""
    properties = {
        name: (dict(entry.read.schema) if entry.required else or_null(entry.read.schema))
        | ({"description": entry.description} if entry.description else {})
        for name, entry in entries.items()
    }
    required = [name for name, entry in entries.items() if entry.required]

    @reader(
        type="object",
        properties=properties,
        additionalProperties=False,
        **({"required": required} if required else {}),
    )
    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidField(path, value, "an object")
        before = f"{path}." if path else ""
        for name in value:
            if name not in entries:
                raise InvalidField(
                    f"{before}{name}", value[name], "no such field; expected one of " + ", ".join(entries)
                )
        for name in required:
            if value.get(name) is None:
                raise InvalidField(f"{before}{name}", None, entries[name].required)
        given = {name: entry for name, entry in value.items() if entry is not None}
        return {name: entries[name].read(entry, f"{before}{name}") for name, entry in given.items()}

    return read


def type_of(*names: str) -> Entry:
    """Return the field of a record that names the record's type."""
    return Entry(one_of(*names), required=" or ".join(f'"{name}"' for name in names))


def one_of_types(kinds: Mapping[str, Reader[T]], refused: Mapping[str, str], what: str) -> Reader[T]:
    """Return a reader of an object by its ``type``; ``refused`` holds known types that are not accepted, with the
    reason."""
    listed = ", ".join(f'"{kind}"' for kind in kinds)

    @reader(**any_of(*(kind.schema for kind in kinds.values())))
    def read(value: Any, path: str) -> T:
        if not isinstance(value, dict):
            raise InvalidField(path, value, f"{what} with a type: {listed}")
        kind = value.get("type")
        found = kinds.get(kind) if isinstance(kind, str) else None
        if found is None:
            why = refused.get(kind, "") if isinstance(kind, str) else ""
            raise InvalidField(f"{path}.type", kind, f"one of {listed}" + (f": {why}" if why else ""))
        return found(value, path)

    return read
