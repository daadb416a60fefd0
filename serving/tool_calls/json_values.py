"""Incremental reading of JSON: finds where a value ends, and decodes strings."""

from __future__ import annotations

import json
import re

from .markers import SPACE

_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r"[ \t\r\n,:0-9A-Za-z+\-.]*")  # the characters allowed between strings and brackets
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_CLOSES = {"}": "{", "]": "["}


class JsonScanner:
    """A scanner for the end of one JSON value.

    It does not validate: it matches brackets and strings, and sets ``broken`` at characters that cannot occur in JSON,
    such as the marker that ends a call.
    """

    __slots__ = ("_escaped", "_in_scalar", "_in_string", "_open", "broken", "done")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._in_scalar = False
        self.done = self.broken = False

    def scan(self, text: str, at: int) -> int:
        """Read the value in ``text`` from ``at`` on and return where reading stopped.

        That is the end of the text, the end of the value (``done``), or the first character that is not JSON
        (``broken``). The value must begin at once, without white space.
        """
        while at < len(text) and not (self.done or self.broken):
            if self._in_string:
                at = self._string(text, at)
            elif self._open:
                at = self._inside(text, at)
            else:
                at = self._begin(text, at)
        return at

    def finish(self) -> None:
        """Note the end of the text, which also ends a number or a word."""
        if self._in_scalar:
            self.done = True

    def _begin(self, text: str, at: int) -> int:
        char = text[at]
        if not self._in_scalar and char in '"{[':
            return self._bracket(text, at)
        end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
        self._in_scalar = self._in_scalar or end > at
        if end < len(text):
            self.done = self._in_scalar
            self.broken = not self._in_scalar
        return end

    def _inside(self, text: str, at: int) -> int:
        at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        return self._bracket(text, at) if at < len(text) else at

    def _bracket(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._open.append(char)
        elif char in _CLOSES and self._open and self._open[-1] == _CLOSES[char]:
            self._open.pop()
            self.done = not self._open
        else:
            self.broken = True
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _STRING.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._open
        return at + 1


class StringDecoder:
    """A decoder of a JSON string, without its quotes, as it arrives. Half of a surrogate pair waits for the other
    half."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Return the decoded text; ``text`` is the next piece inside the quotes of one string."""
        text = self._held + text
        cut = _complete(text)
        text, self._held = text[:cut], text[cut:]
        return _ESCAPES.sub(_said, text) if "\\" in text else text

    def flush(self) -> str:
        """Return an escape that was never completed, undecoded."""
        rest, self._held = self._held, ""
        return rest


_PAIR = r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
_ESCAPES = re.compile(_PAIR + r'|\\u(?![dD][89a-fA-F])[0-9A-Fa-f]{4}|\\["\\/bfnrt]|\\.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,4}|.?)", re.DOTALL)
_TAIL = re.compile(r"(?:\\u[dD][89abAB][0-9A-Fa-f]{2})?\\(?:u[0-9A-Fa-f]{0,3})?\Z|\\u[dD][89abAB][0-9A-Fa-f]{2}\Z")


def _said(found: re.Match[str]) -> str:
    """Return the character that an escape stands for; an escape that JSON does not define is returned unchanged."""
    try:
        return str(json.loads(f'"{found[0]}"'))
    except ValueError:
        return found[0]


def _complete(text: str) -> int:
    """Return the length of the part of ``text`` before an incomplete escape at its end."""
    start = max(0, len(text) - 12)
    # do not begin the window within a run of backslashes: their number decides which of them are escapes
    while start > 0 and text[start - 1] == "\\":
        start -= 1
    at = start
    while (at := text.find("\\", at)) >= 0:
        if _TAIL.match(text, at):
            return at
        found = _ESCAPE.match(text, at)
        at = found.end() if found else at + 1
    return len(text)


class MemberText:
    """A stream of the string in an object of one member, ``{"input": "…"}``: the input of a custom tool's call.

    An object of any other form is given out unchanged.
    """

    __slots__ = ("_begin", "_decoder", "_ended", "_held", "_raw", "_string")

    def __init__(self, name: str) -> None:
        self._begin = re.compile(r"\s*\{\s*" + re.escape(json.dumps(name)) + r'\s*:\s*"')
        self._held = ""
        self._raw = self._ended = False
        self._string: JsonScanner | None = None
        self._decoder = StringDecoder()

    def push(self, text: str) -> str:
        """Return the part of the string that is known once ``text``, the next piece of the object, is added."""
        if self._raw:
            return text
        if self._ended:
            return ""
        if self._string is None:
            self._held += text
            begin = self._begin.match(self._held)
            if begin is None:
                if _hopeless(self._held):
                    self._raw = True
                    return self._held
                return ""
            text, self._held = self._held[begin.end() :], ""
            self._string = JsonScanner()
            self._string.scan('"', 0)
        end = self._string.scan(text, 0)
        self._ended = self._string.done
        return self._decoder.push(text[: end - 1] if self._ended else text[:end])

    def flush(self) -> str:
        """Return the rest at the end of the call."""
        return self._held if self._string is None and not self._raw else self._decoder.flush()


def _hopeless(text: str) -> bool:
    """Return whether an object that begins with ``text`` cannot have one string as its member, or is too long to
    tell."""
    if len(text) > 256:
        return True
    body = text.strip(SPACE)
    if not body.startswith("{"):
        return bool(body)
    rest = body[1:].lstrip(SPACE)
    if not rest.startswith('"'):
        return bool(rest)
    scanner = JsonScanner()
    end = scanner.scan(rest, 0)
    after = rest[end:].lstrip(SPACE) if scanner.done else ""
    value = after[1:].lstrip(SPACE) if after.startswith(":") else ""
    return bool(value) or (bool(after) and not after.startswith(":"))
