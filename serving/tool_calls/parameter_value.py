"""Converts the value of one tagged parameter to JSON as it arrives; its text may stand for a value of another type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from .markers import SPACE, skip_space
from .python_values import PythonValue, scalar_json, text_json

_NUMBER = re.compile(r"[-+0-9.eE_]{1,64}")
_WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}


class ParameterValue:
    """The value of one parameter; ``say`` gets its JSON.

    ``types`` are the types that the tool's schema allows: () if it does not say, ("json",) if the format says that the
    value is JSON. A string is streamed as soon as it can be nothing else; so are objects and lists if no string is
    allowed. A value that may still be either is held until its end. ``broken`` means that a value was streamed as an
    object or list but turned out not to be one.
    """

    __slots__ = ("_held", "_kind", "_pieces", "_say", "_structure", "_types", "broken")

    def __init__(self, say: Callable[[str], None], types: tuple[str, ...]) -> None:
        self._say = say
        self._types = frozenset(types)
        self._held = ""
        self._kind: Literal["open", "text", "structure", "either"] = "open"
        self._pieces: list[str] = []  # the pieces of a value that may be an object or a string
        self._structure = PythonValue(say)
        self.broken = False
        if self._types == {"string"}:
            self._begin_text()

    def push(self, text: str) -> int:
        """Read ``text`` and return how much of it was read: all, or up to the place where it is ``broken``."""
        size = len(text)
        if self._kind == "open":
            self._held += text
            text = self._decide()
        if self._kind == "text":
            self._say(text_json(text))
        elif self._kind == "either":
            self._pieces.append(text)
        elif self._kind == "structure":
            end = self._structure.push(text, 0)
            if self._structure.done:
                end = skip_space(text, end)
            self.broken = self._structure.broken or end < len(text)
            return end - (len(text) - size)
        return size

    def end(self) -> None:
        """Finish the value, which is complete."""
        if self._kind == "either":
            self._kind, self._held = "open", "".join(self._pieces)
        if self._kind == "open":
            said = self._converted(self._held.strip(SPACE))
            self._say(f'"{text_json(self._held)}"' if said is None else said)
        elif self._kind == "text":
            self._say('"')

    def cut(self) -> None:
        """Finish a value within which the text has ended: held text is given out as the beginning of a string."""
        if self._kind == "either":
            self._kind, self._held = "open", "".join(self._pieces)
        if self._kind == "open" and self._held.strip(SPACE) and not self._types.isdisjoint({"string"}):
            self._begin_text()
            self._say(text_json(self._held))

    def _begin_text(self) -> None:
        self._kind = "text"
        self._say('"')

    def _decide(self) -> str:
        """Return the held text once the kind of the value is known, and set the kind; "" before that."""
        body = self._held.strip(SPACE)
        if not body:
            return ""
        texts = not self._types or "string" in self._types
        if texts and not self._may_be_other(body):
            self._begin_text()
        elif texts and body[0] in "{[":
            self._kind = "either"
        elif not texts and body[0] in "{[" and self._types & {"object", "array", "json"}:
            self._kind = "structure"
        else:
            return ""
        held, self._held = self._held, ""
        return held

    def _may_be_other(self, body: str) -> bool:
        """Return whether ``body`` may become something other than a string when it continues."""
        if body[0] in "{[":
            return self._allows("object", "array")
        if _NUMBER.fullmatch(body):
            return self._allows("integer", "number")
        return any(word.startswith(body) for kind, words in _WORDS.items() if self._allows(kind) for word in words)

    def _allows(self, *kinds: str) -> bool:
        return not self._types or "json" in self._types or not self._types.isdisjoint(kinds)

    def _converted(self, body: str) -> str | None:
        """Return ``body`` as JSON of an allowed type; None if it is a string."""
        if body.lower() in ("true", "false") and self._allows("boolean"):
            return body.lower()
        if body in ("null", "None"):
            return "null" if self._allows("null") else None
        if body[:1] in ("{", "["):
            return _structure(body) if self._allows("object", "array") else None
        if body[:1] == '"' and "json" in self._types:
            return _loaded(body)
        scalar = scalar_json(body) if self._allows("integer", "number") else None
        if scalar is not None and "integer" in self._types and "number" not in self._types:
            value: Any = json.loads(scalar)
            if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
                return str(int(value))
        return scalar


def _structure(body: str) -> str | None:
    if (said := _loaded(body)) is not None:
        return said
    parts: list[str] = []
    value = PythonValue(parts.append)
    end = value.push(body, 0)
    return "".join(parts) if value.done and end == len(body) else None


def _loaded(body: str) -> str | None:
    """Return ``body`` if it is JSON, otherwise None."""
    try:
        json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return body


def _refuse(name: str) -> Any:
    raise ValueError(name)
