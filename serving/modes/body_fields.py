"""Reading the management API's bodies: objects of known fields, and errors that name a field as the caller wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import InvalidField


def read_object(value: Any, field: str, allowed: set[str]) -> dict[str, Any]:
    """``field`` "" is the body itself."""
    if not isinstance(value, dict):
        raise InvalidField(field, value, "an object")
    for key in value:
        if key not in allowed:
            raise InvalidField(join(field, key), value[key], "no such field; known are " + ", ".join(sorted(allowed)))
    return value


def read_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidField(field, value, "a list")
    return value


def join(parent: str, field: str) -> str:
    return ".".join(filter(None, (parent, field)))


@contextmanager
def named(parent: str, spelling: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors inside name their field behind ``parent``, and words of its path by the caller's ``spelling``."""
    try:
        yield
    except InvalidField as error:
        words = spelling or {}
        error.rename(join(parent, re.sub(r"\w+", lambda word: words.get(word[0], word[0]), error.param or "")))
        raise
