"""JSON that comes piece by piece: where a value ends, and what a string says."""

from __future__ import annotations

import json
import re

from .markers import SPACE

_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r"[ \t\r\n,:0-9A-Za-z+\-.]*")  # what may stand between strings and brackets
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_CLOSES = {"}": "{", "]": "["}


class JsonScanner:
    """Finds the end of one value. It is no validator: it counts brackets, knows strings, and calls ``broken`` what can
    be in no JSON, such as the marker that ends a call."""

    __slots__ = ("_escaped", "_in_scalar", "_in_string", "_open", "broken", "done")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._in_scalar = False
        self.done = self.broken = False

    def scan(self, text: str, at: int) -> int:
        """How far the value goes in ``text``: to the end of the text, or to its own (``done``), or to what is not JSON
        (``broken``). It must begin at once, without white space."""
        while at < len(text) and not (self.done or self.broken):
            if self._in_string:
                at = self._string(text, at)
            elif self._open:
                at = self._inside(text, at)
            else:
                at = self._begin(text, at)
        return at

    def finish(self) -> None:
        """The text has ended: a number or a word ends with it."""
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
    """What a JSON string says, without its quotes, as it comes. Half of a surrogate pair waits for the other."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """``text`` must be of the inside of one string."""
        text = self._held + text
        cut = _complete(text)
        text, self._held = text[:cut], text[cut:]
        return _ESCAPES.sub(_said, text) if "\\" in text else text

    def flush(self) -> str:
        """An escape that was never completed, as it stands."""
        rest, self._held = self._held, ""
        return rest


_PAIR = r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
_ESCAPES = re.compile(_PAIR + r'|\\u(?![dD][89a-fA-F])[0-9A-Fa-f]{4}|\\["\\/bfnrt]|\\.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,4}|.?)", re.DOTALL)
_TAIL = re.compile(r"(?:\\u[dD][89abAB][0-9A-Fa-f]{2})?\\(?:u[0-9A-Fa-f]{0,3})?\Z|\\u[dD][89abAB][0-9A-Fa-f]{2}\Z")


def _said(found: re.Match[str]) -> str:
    """The character that an escape means; one that JSON does not have as it stands."""
    try:
        return str(json.loads(f'"{found[0]}"'))
    except ValueError:
        return found[0]


def _complete(text: str) -> int:
    """How much of ``text`` does not end amid an escape."""
    start = max(0, len(text) - 12)
    # an even run of backslashes before the window's end is complete escapes
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
    """The text of the one member of an object, ``{"input": "…"}``, as it comes: what a custom tool is called with.

    An object of any other form comes out as it stands.
    """

    __slots__ = ("_begin", "_decoder", "_ended", "_held", "_raw", "_string")

    def __init__(self, name: str) -> None:
        self._begin = re.compile(r"\s*\{\s*" + re.escape(json.dumps(name)) + r'\s*:\s*"')
        self._held = ""
        self._raw = self._ended = False
        self._string: JsonScanner | None = None
        self._decoder = StringDecoder()

    def push(self, text: str) -> str:
        """``text``: more of the object."""
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
        """The rest, at the end of the call."""
        return self._held if self._string is None and not self._raw else self._decoder.flush()


def _hopeless(text: str) -> bool:
    """Whether this beginning of an object can be none with one text: its value begins with something else."""
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
