"""Reads a call that is written as a JSON object, up to the beginning of its arguments."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal, TypeAlias

from ..interface.tool_format import ToolFormat
from .json_values import JsonScanner
from .markers import skip_space

MAX_HELD = 32768  # characters
Status: TypeAlias = Literal["open", "arguments", "held", "closed", "failed"]
_Role: TypeAlias = Literal["key", "name", "arguments", "other"]


class CallObject:
    """A reader of ``{"name": …, "arguments": …}`` in any order, also within ``{"type": "function", "function": {…}}``.

    ``status`` is "arguments" where their value begins and the name is known, "held" if the name came after them
    (``arguments`` is their text), "closed" at the end of an object with a name and no arguments, and "failed" if the
    text is no such object or its name is not one of ``names``.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self._format = format
        self._names = names
        self._expect: Literal["begin", "first", "key", "colon", "value", "comma"] = "begin"
        self._key = ""
        self._role: _Role = "other"
        self._scanner: JsonScanner | None = None
        self._pieces: list[str] = []
        self._room = MAX_HELD
        self.depth = 0
        self.name: str | None = None
        self.arguments: str | None = None
        self.status: Status = "open"

    def push(self, text: str, at: int) -> int:
        """Read the object in ``text`` from ``at`` on and return where reading stopped.

        The object fails if it does not tell within ``MAX_HELD`` characters which tool it calls.
        """
        text = text[: at + self._room]
        begun, at = at, self._push(text, at)
        self._room -= at - begun
        if self._room == 0 and self.status == "open":
            self.status = "failed"
        return at

    def _push(self, text: str, at: int) -> int:
        while at < len(text) and self.status == "open":
            if self._scanner is not None:
                at = self._scan(self._scanner, text, at)
                continue
            at = skip_space(text, at)
            if at < len(text):
                at += self._token(text[at])
        return at

    def _scan(self, scanner: JsonScanner, text: str, at: int) -> int:
        end = scanner.scan(text, at)
        if self._role != "other":
            self._pieces.append(text[at:end])
        if scanner.broken:
            self.status = "failed"
        elif scanner.done:
            self._scanner = None
            self._end(self._role, "".join(self._pieces))
        return end

    def _end(self, role: _Role, text: str) -> None:
        self._pieces = []
        self._expect = "colon" if role == "key" else "comma"
        if role == "arguments":
            self.arguments = text
        elif role != "other":
            try:
                said = json.loads(text, strict=False)
            except ValueError:
                self.status = "failed"
                return
            if role == "key":
                self._key = said
                return
            self.name = said
            if said not in self._names:
                self.status = "failed"
            elif self.arguments is not None:
                self.status = "held"

    def _token(self, char: str) -> int:
        """Read the next token and return how many characters it takes: none where a value begins."""
        expect = self._expect
        if expect == "begin" and char == "{":
            self.depth, self._expect = 1, "first"
        elif expect in ("first", "key") and char == '"':
            return self._begin("key")
        elif expect in ("first", "comma") and char == "}":
            self._close()
        elif expect == "colon" and char == ":":
            self._expect = "value"
        elif expect == "comma" and char == ",":
            self._expect = "key"
        elif expect == "value":
            return self._value(char)
        else:
            self.status = "failed"
            return 0
        return 1

    def _value(self, char: str) -> int:
        if self._key == "function" and char == "{" and self.depth == 1:
            self.depth, self._expect = 2, "first"
            return 1
        if self._key in (self._format.name_key, "function") and char == '"' and self.name is None:
            return self._begin("name")
        if self._key in self._format.arguments_keys and self.arguments is None:
            if self.name is None:
                return self._begin("arguments")
            self.status = "arguments"
            return 0
        return self._begin("other")

    def _begin(self, role: _Role) -> int:
        self._role = role
        self._scanner = JsonScanner()
        return 0

    def _close(self) -> None:
        self.depth -= 1
        self._expect = "comma"
        if self.depth == 0:
            self.status = "failed" if self.name is None else "closed"
