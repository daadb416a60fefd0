"""Readers of request fields: a table names each field, how its value is read and where it goes.

A reader takes ``(value, path)`` and returns the value as the raw request holds it, or raises ``InvalidField`` with
the path (``messages[2].content``), the value and what is allowed. JSON's types are kept apart: true is not 1, "1" is
not 1, NaN and Infinity are no numbers. 2.0 counts as an integer, as in JSON Schema, since some clients have only
floats. Null always means the default. The same tables give the MLflow signature and OpenAPI (``schema``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..errors import InvalidField

Reader = Callable[[Any, str], Any]
INT64 = 2**63
UINT64_MAX = 2**64 - 1
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One request field. ``target`` is the attribute of the raw request (``sampling.top_k`` for sampling's own);
    None is a field that is checked and then means nothing to this server, ``note`` says why."""

    name: str
    read: Reader
    schema: Mapping[str, Any]
    target: str | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The fields of one task in one dialect, by name. ``refused`` names fields that are known but not built."""

    required: str
    fields: Mapping[str, Field]
    refused: Mapping[str, str] = field(default_factory=dict)

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``{target: value}`` of the fields present and not null. Raises ``InvalidField``."""
        found: dict[str, Any] = {}
        for name, value in body.items():
            known = self.fields.get(name) if isinstance(name, str) else None
            if known is None:
                self._refuse(name, value)
            elif value is not None:
                parsed = known.read(value, name)
                if known.target is not None:
                    found[known.target] = parsed
        if body.get(self.required) is None:
            raise InvalidField(
                self.required, None, str(self.fields[self.required].schema.get("description", "a value"))
            )
        return found

    def _refuse(self, name: Any, value: Any) -> None:
        if name in self.refused:
            if value not in (None, [], {}, False):
                raise InvalidField(str(name), value, f"null: {self.refused[name]}")
            return
        raise unknown_field(name, value, self.fields)


def unknown_field(name: Any, value: Any, known: Mapping[str, Any] | Sequence[str], parent: str = "") -> InvalidField:
    """The error for a field nobody knows, with the nearest known name."""
    shown_name = str(name)[:64]
    near = difflib.get_close_matches(shown_name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidField(parent + shown_name, value, f"no such field{hint}")


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidField(path, value, "true or false")
    return value


def integer(low: int = -INT64, high: int = INT64 - 1) -> Reader:
    """An integer in [low, high]."""
    allowed = f"an integer in [{low}, {high}]" if high < INT64 - 1 else f"an integer of at least {low}"

    def read(value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidField(path, value, allowed)
        return value

    return read


def number(low: float, high: float = math.inf, *, above: bool = False, what: str = "") -> Reader:
    """A finite number in [low, high]; ``above`` leaves ``low`` itself out."""
    allowed = what or f"a number in {'(' if above else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"

    def read(value: Any, path: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidField(path, value, allowed)
        inside = low < value <= high if above else low <= value <= high  # NaN compares false
        if not inside or value == math.inf:
            raise InvalidField(path, value, allowed)
        try:
            return float(value)
        except OverflowError:
            raise InvalidField(path, value, allowed) from None

    return read


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


def one_of(*options: Any) -> Reader:
    allowed = "one of " + ", ".join(repr(option) for option in options)

    def read(value: Any, path: str) -> Any:
        if not any(type(value) is type(option) and value == option for option in options):
            raise InvalidField(path, value, allowed)
        return value

    return read


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


def list_of(item: Reader, allowed: str) -> Reader:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise InvalidField(path, value, allowed)
        return tuple(item(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    return read


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


def texts_or_tokens(value: Any, path: str) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    """``(prompts, batched)`` of a string, a list of strings, a list of token ids or a list of such lists."""
    allowed = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return (string(value, path),), False
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, allowed + ", not empty")
    if _is_int(value[0]):
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: Sequence[Any], path: str) -> tuple[int, ...]:
    if not value:
        raise InvalidField(path, value, "at least one token id")
    for i, entry in enumerate(value):
        if not _is_int(entry) or not 0 <= entry < 2**31:
            raise InvalidField(f"{path}[{i}]", entry, "a token id: an integer of at least 0")
    return tuple(value)


def logit_bias(value: Any, path: str) -> dict[int, float]:
    """``{"token id": bias}`` with biases in [-100, 100], at most 1024 of them."""
    read_bias = number(-100, 100)
    if not isinstance(value, dict) or len(value) > 1024:
        raise InvalidField(path, value, "an object of at most 1024 token ids to numbers in [-100, 100]")
    found = {}
    for key, bias in value.items():
        token = str(key)
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidField(path, key, "token ids as keys")
        found[int(token)] = read_bias(bias, f"{path}.{token}")
    return found


def task_of(body: Any, task: str | None) -> str:
    """The task a body asks for: ``messages`` chat, ``prompt`` completions, ``input`` embeddings."""
    if not isinstance(body, dict):
        raise InvalidField("body", body, "a JSON object")
    if task is not None:
        return task
    names = {"messages": "chat", "prompt": "completions", "input": "embeddings"}
    found = [name for name in names if body.get(name) is not None]
    if len(found) != 1:
        raise InvalidField("body", sorted(map(str, body))[:8], "exactly one of messages, prompt and input")
    return names[found[0]]
