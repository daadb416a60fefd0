"""Readers of values: each reads one kind of value and has the JSON schema of what it takes.

A reader is called with ``(value, path)`` and returns the value as the raw request holds it, or raises ``InvalidField``
with the path (``messages[2].content``), the value and what is allowed. JSON's types are kept apart: true is not 1, "1"
is not 1, NaN and Infinity are no numbers. 2.0 counts as an integer, as in JSON Schema, since some clients have only
floats. No reader takes null: what it means is for the table to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from ..errors import InvalidField

INT64 = 2**63
UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1
MAX_DEPTH = 64

T = TypeVar("T")
JSON_TYPES = {str: "string", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Reader(Generic[T]):
    """``schema`` tells callers what ``read`` takes; a test compares the two."""

    read: Callable[[Any, str], T]
    schema: Mapping[str, Any]

    def __call__(self, value: Any, path: str) -> T:
        return self.read(value, path)


def reader(**schema: Any) -> Callable[[Callable[[Any, str], T]], Reader[T]]:
    """Decorates the function that reads."""
    return lambda read: Reader(read, schema)


@reader(type="boolean")
def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidField(path, value, "true or false")
    return value


def integer(low: int, high: int) -> Reader[int]:
    """An integer in [low, high]."""

    @reader(type="integer", minimum=low, maximum=high)
    def read(value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidField(path, value, f"an integer in [{low}, {high}]")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader[float]:
    """A finite number in [low, high]; ``above`` leaves ``low`` itself out."""
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
    """A text that UTF-8 can carry: JSON escapes can spell half a surrogate pair, no tokenizer takes it."""
    if not isinstance(value, str):
        raise InvalidField(path, value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidField(path, value, "valid Unicode text without lone surrogates") from None
    return value


def one_of(*options: Any, why: str = "") -> Reader[Any]:
    """One of the values themselves. ``why`` nothing else is taken, where these ask for no more than null does."""
    listed = ", ".join(json.dumps(option) for option in options)
    allowed = f"one of null, {listed}: {why}" if why else f"one of {listed}"
    kinds = list(dict.fromkeys(JSON_TYPES[type(option)] for option in options))

    @reader(type=kinds[0] if len(kinds) == 1 else kinds, enum=list(options))
    def read(value: Any, path: str) -> Any:
        if not any(type(value) is type(option) and value == option for option in options):
            raise InvalidField(path, value, allowed)
        return value

    return read


@reader(type="object")
def obj(value: Any, path: str) -> dict[str, Any]:
    """An object of any content, ``MAX_DEPTH`` levels of it: templates and those who walk it recurse."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidField(path, value, "an object")
    if not is_shallow(value):
        raise InvalidField(path, value, f"an object of at most {MAX_DEPTH} levels")
    return value


def is_shallow(value: Any) -> bool:
    """Whether objects and lists lie in each other at most ``MAX_DEPTH`` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = chain.from_iterable(entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for entry in inside if isinstance(entry, dict | list | tuple)]
        if not level:
            return True
    return False


def list_of(item: Reader[T], allowed: str, *, least: int = 0) -> Reader[tuple[T, ...]]:
    @reader(type="array", items=item.schema, **({"minItems": least} if least else {}))
    def read(value: Any, path: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or len(value) < least:
            raise InvalidField(path, value, allowed)
        return tuple(item(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    return read


def any_of(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


_STOP = {"type": "string", "minLength": 1}


@reader(**any_of(_STOP, {"type": "array", "items": _STOP}))
def stop_strings(value: Any, path: str) -> tuple[str, ...]:
    """One stop string or a list of them; how many is for the endpoint's profile to say."""
    allowed = "a non-empty string or a list of them"
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        raise InvalidField(path, value, allowed)
    for i, entry in enumerate(entries):
        where = path if entries is not value else f"{path}[{i}]"
        if not isinstance(entry, str) or not entry:
            raise InvalidField(where, entry, allowed)
        string(entry, where)
    return tuple(dict.fromkeys(entries))


TOKEN = integer(0, INT32_MAX)
TOKENS = list_of(TOKEN, "at least one token id", least=1)


def _token_ids(value: Sequence[Any], path: str) -> tuple[int, ...]:
    if value and all(type(entry) is int and 0 <= entry <= INT32_MAX for entry in value):
        return tuple(value)  # prompts may have a million of them
    return TOKENS(value, path)


@reader(
    **any_of(
        string.schema,
        {"type": "array", "items": string.schema, "minItems": 1},
        TOKENS.schema,
        {"type": "array", "items": TOKENS.schema, "minItems": 1},
    )
)
def texts_or_tokens(value: Any, path: str) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    """``(prompts, batched)`` of a string, a list of strings, a list of token ids or a list of such lists."""
    allowed = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return (string(value, path),), False
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, allowed + ", not empty")
    if isinstance(value[0], int | float) and not isinstance(value[0], bool):
        return (_token_ids(value, path),), False
    if not isinstance(value[0], str | list | tuple):
        raise InvalidField(f"{path}[0]", value[0], allowed)
    kind = str if isinstance(value[0], str) else (list, tuple)
    for i, entry in enumerate(value):
        if not isinstance(entry, kind):
            raise InvalidField(f"{path}[{i}]", entry, f"the type of {path}[0]: {allowed}")
    if kind is str:
        return tuple(string(entry, f"{path}[{i}]") for i, entry in enumerate(value)), True
    return tuple(_token_ids(entry, f"{path}[{i}]") for i, entry in enumerate(value)), True


_BIAS = number(-100, 100)
_BIASES = 1024


@reader(
    type="object",
    propertyNames={"pattern": "^[0-9]{1,9}$"},
    additionalProperties=_BIAS.schema,
    maxProperties=_BIASES,
)
def logit_bias(value: Any, path: str) -> dict[int, float]:
    """``{"token id": bias}``."""
    if not isinstance(value, dict) or len(value) > _BIASES:
        raise InvalidField(path, value, f"an object of at most {_BIASES} token ids to numbers in [-100, 100]")
    found = {}
    for key, bias in value.items():
        token = str(key)
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidField(path, key, "token ids as keys")
        found[int(token)] = _BIAS(bias, f"{path}.{token}")
    return found
