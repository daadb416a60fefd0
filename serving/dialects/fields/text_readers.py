"""Readers of values that only requests for text have: prompts, stop strings, token biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import INT32_MAX, any_of, integer, list_of, number, obj, reader, string
from ...interface.request import MAX_PROMPTS

_STOP = {"type": "string", "minLength": 1}
STOPS: Mapping[str, Any] = {"type": "array", "items": _STOP}


@reader(**any_of(_STOP, STOPS))
def stop_strings(value: Any, path: str) -> tuple[str, ...]:
    """Read one stop string or a list of them; the endpoint's profile limits their number."""
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
TOKENS = list_of(TOKEN, "at least one token id", minimum=1)
_MAX_WORDS = 1024


@reader(type="array", items=any_of(_STOP, TOKENS.schema), maxItems=_MAX_WORDS)
def bad_words(value: Any, path: str) -> tuple[str | tuple[int, ...], ...]:
    """Read a list of texts, each of which may also be a list of its token ids."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_WORDS:
        raise InvalidField(path, value, f"a list of at most {_MAX_WORDS} texts or lists of token ids")
    found: list[str | tuple[int, ...]] = []
    for i, word in enumerate(value):
        where = f"{path}[{i}]"
        if isinstance(word, list | tuple):
            found.append(TOKENS(word, where))
        elif isinstance(word, str) and word:
            found.append(string(word, where))
        else:
            raise InvalidField(where, word, "a non-empty text or a list of token ids")
    return tuple(found)


def _token_ids(value: Sequence[Any], path: str) -> tuple[int, ...]:
    if value and all(type(entry) is int and 0 <= entry <= INT32_MAX for entry in value):
        return tuple(value)  # faster: a prompt may have a million token ids
    return TOKENS(value, path)


@reader(
    **any_of(
        string.schema,
        {"type": "array", "items": string.schema, "minItems": 1, "maxItems": MAX_PROMPTS},
        TOKENS.schema,
        {"type": "array", "items": TOKENS.schema, "minItems": 1, "maxItems": MAX_PROMPTS},
    )
)
def texts_or_tokens(value: Any, path: str) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    """Return ``(prompts, batched)`` of a string, a list of strings, a list of token ids or a list of such lists."""
    allowed = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return (string(value, path),), False
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, allowed + ", not empty")
    if isinstance(value[0], int | float) and not isinstance(value[0], bool):
        return (_token_ids(value, path),), False
    if not isinstance(value[0], str | list | tuple):
        raise InvalidField(f"{path}[0]", value[0], allowed)
    if len(value) > MAX_PROMPTS:
        raise InvalidField(path, f"{len(value)} entries", f"at most {MAX_PROMPTS}")
    kind = str if isinstance(value[0], str) else (list, tuple)
    for i, entry in enumerate(value):
        if not isinstance(entry, kind):
            raise InvalidField(f"{path}[{i}]", entry, f"the type of {path}[0]: {allowed}")
    if kind is str:
        return tuple(string(entry, f"{path}[{i}]") for i, entry in enumerate(value)), True
    return tuple(_token_ids(entry, f"{path}[{i}]") for i, entry in enumerate(value)), True


MAX_VARIABLE_CHARACTERS = 64 * 2**10  # characters and values of chat_template_kwargs


@reader(**obj.schema)
def template_variables(value: Any, path: str) -> dict[str, Any]:
    """Read an object of at most ``MAX_VARIABLE_CHARACTERS`` characters, keys and values together.

    They are limited because a template may print each of them many times.
    """
    found = obj(value, path)
    left = MAX_VARIABLE_CHARACTERS
    inside: list[Any] = [found]
    while inside and left >= 0:
        entry = inside.pop()
        left -= 1 + (len(entry) if isinstance(entry, str | dict | list | tuple) else 0)
        if left >= 0 and isinstance(entry, dict):
            inside += [*entry, *entry.values()]
        elif left >= 0 and isinstance(entry, list | tuple):
            inside += entry
    if left < 0:
        raise InvalidField(
            path, "an object", f"one of at most {MAX_VARIABLE_CHARACTERS} characters and values together"
        )
    return found


_BIAS = number(-100, 100)
_MAX_BIASES = 1024


@reader(
    type="object",
    propertyNames={"pattern": "^[0-9]{1,9}$"},
    additionalProperties=_BIAS.schema,
    maxProperties=_MAX_BIASES,
)
def logit_bias(value: Any, path: str) -> dict[int, float]:
    """Read ``{"token id": bias}``."""
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        raise InvalidField(path, value, f"an object of at most {_MAX_BIASES} token ids to numbers in [-100, 100]")
    found = {}
    for key, bias in value.items():
        token = str(key)
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidField(path, key, "token ids as keys")
        if int(token) in found:
            raise InvalidField(path, key, f"one value for each token; {int(token)} has two")
        found[int(token)] = _BIAS(bias, f"{path}.{token}")
    return found
