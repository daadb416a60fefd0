"""Converts values in Python's notation to JSON as they arrive. JSON's own words and strings are accepted too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Literal, TypeAlias

from .markers import skip_space

MAX_DEPTH = 128
MAX_WORD = 400  # characters of a number or a name
_WORD = re.compile(r"[0-9A-Za-z_+\-.]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_OPENS = {")": "(", "]": "[", "}": "{"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")
_PYTHON_NUMBER = re.compile(r"[+-]?(?:0[xXoObB][0-9a-fA-F_]+|[0-9_]*\.?[0-9_]*(?:[eE][+-]?[0-9]+)?)")
_Expect: TypeAlias = Literal["value", "key", "colon", "comma"]


def text_json(text: str) -> str:
    """Return ``text`` escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar_json(word: str) -> str | None:
    """Return a number or a word of Python or JSON as JSON; None for anything else.

    A number that is already JSON is returned unchanged.
    """
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if len(word) > MAX_WORD or not _PYTHON_NUMBER.fullmatch(word):
        return None
    for read in (lambda: int(word, 0), lambda: int(word, 10), lambda: float(word)):
        try:
            value = read()
        except (ValueError, OverflowError):
            continue
        return json.dumps(value) if math.isfinite(value) else None
    return None


class PythonString:
    """A reader of one string from its opening quote on.

    ``say`` gets its text with escapes resolved. ``done`` is set after the closing quote.
    """

    __slots__ = ("_held", "_high", "_inside", "_quote", "_say", "done")

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._quote = ""
        self._held = ""  # quotes or an escape that are not complete yet
        self._high = 0  # the first half of a surrogate pair
        self._inside: re.Pattern[str] | None = None
        self.done = False

    def push(self, text: str, at: int) -> int:
        """Read the string in ``text`` from ``at`` on and return where reading stopped."""
        while at < len(text) and not self.done:
            if self._inside is None:
                at = self._open(text[at], at)
            elif not self._held:
                at = self._text(text, at)
            elif self._held[0] == "\\":
                at = self._escape(text[at], at)
            else:
                at = self._close(text[at], at)
        return at

    def finish(self) -> None:
        """Note the end of the text: two quotes at its end are an empty string."""
        self.done = self.done or (self._inside is None and len(self._held) == 2)

    def _open(self, char: str, at: int) -> int:
        if not self._held or char == self._held[0]:
            self._held += char
            if len(self._held) == 3:
                self._begin()
            return at + 1
        if len(self._held) == 2:
            self.done = True
        else:
            self._begin()
        return at

    def _begin(self) -> None:
        self._quote, self._held = self._held, ""
        self._inside = re.compile(r"[^\\" + self._quote[0] + "]*")

    def _text(self, text: str, at: int) -> int:
        assert self._inside is not None
        found = self._inside.match(text, at)
        assert found is not None
        self._out(found[0])
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._held = "\\"
            return at + 1
        return self._close(text[at], at)

    def _close(self, char: str, at: int) -> int:
        if char != self._quote[0]:  # after one or two of three quotes
            held, self._held = self._held, ""
            self._out(held)
            return at
        self._held += char
        if self._held == self._quote:
            self._flush()
            self.done = True
        return at + 1

    def _escape(self, char: str, at: int) -> int:
        kind = self._held[1:2]
        if not kind and char in _DIGITS:
            self._held += char
            return at + 1
        held, self._held = self._held, ""
        if not kind:
            self._out(self._meant(char))
            return at + 1
        if char not in "0123456789abcdefABCDEF":
            self._out(held)
            return at
        if len(held) + 1 < 2 + _DIGITS[kind]:
            self._held = held + char
        else:
            self._code(held + char)
        return at + 1

    def _meant(self, char: str) -> str:
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char in "\\'\"" or (char == "/" and self._quote[0] == '"'):
            return char
        return "\\" + char

    def _code(self, escape: str) -> None:
        code = int(escape[2:], 16)
        if 0xD800 <= code < 0xDC00:
            self._flush()
            self._high = code
        elif 0xDC00 <= code < 0xE000 and self._high:
            code, self._high = 0x10000 + ((self._high - 0xD800) << 10) + code - 0xDC00, 0
            self._out(chr(code))
        elif code > 0x10FFFF:
            self._out(escape)
        else:
            self._out("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _out(self, text: str) -> None:
        if text:
            self._flush()
            self._say(text)

    def _flush(self) -> None:
        """Give out U+FFFD for half of a surrogate pair whose other half did not follow."""
        if self._high:
            self._high = 0
            self._say("\ufffd")


class PythonValue:
    """A reader of one value; ``say`` gets it as JSON, formatted like the output of ``json.dumps``.

    ``done`` is set after the value, ``broken`` if the text is not a value.
    """

    __slots__ = ("_after_comma", "_expect", "_open", "_say", "_string", "_word", "broken", "done")

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: list[str] = []
        self._expect: _Expect = "value"
        self._after_comma = False  # a comma is written only when an item follows it
        self._string: PythonString | None = None
        self._word = ""
        self.done = self.broken = False

    def push(self, text: str, at: int) -> int:
        """Read the value in ``text`` from ``at`` on and return where reading stopped."""
        while at < len(text) and not (self.done or self.broken):
            if self._string is not None:
                at = self._in_string(text, at)
            elif self._word:
                at = self._in_word(text, at)
            else:
                at = skip_space(text, at)
                if at < len(text):
                    at = self._token(text, at)
        return at

    def finish(self) -> None:
        """Note the end of the text, which may also end a number, a word or an empty string."""
        if self._word:
            self._end_word()
        elif self._string is not None:
            self._string.finish()
            if self._string.done:
                self._end_string()

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        if self._expect in ("value", "key"):
            return self._begin(char, text, at)
        if self._expect == "colon":
            if char != ":":
                self.broken = True
                return at
            self._say(": ")
            self._expect = "value"
        elif char == ",":
            self._after_comma = True
            self._expect = "key" if self._open[-1] == "{" else "value"
        else:
            return self._close(char, at)
        return at + 1

    def _begin(self, char: str, text: str, at: int) -> int:
        if char in ")]}" and self._open:
            return self._close(char, at)
        if char in "'\"":
            self._lead()
            self._say('"')
            self._string = PythonString(lambda said: self._say(text_json(said)))
            return at
        if self._expect == "value" and char in "[({":
            self._lead()
            self._open.append(char)
            self._say("{" if char == "{" else "[")
            self._expect = "key" if char == "{" else "value"
            self.broken = len(self._open) > MAX_DEPTH
            return at + 1
        if _WORD.match(text, at).end() == at:  # type: ignore[union-attr]
            self.broken = True
            return at
        return self._in_word(text, at)

    def _lead(self) -> None:
        if self._after_comma:
            self._say(", ")
            self._after_comma = False

    def _close(self, char: str, at: int) -> int:
        if _OPENS.get(char) != self._open[-1] or (self._expect == "value" and char == "}"):
            self.broken = True
            return at
        self._after_comma = False
        self._open.pop()
        self._say("}" if char == "}" else "]")
        self._end()
        return at + 1

    def _end(self) -> None:
        self._expect = "comma"
        self.done = not self._open

    def _in_string(self, text: str, at: int) -> int:
        assert self._string is not None
        at = self._string.push(text, at)
        if self._string.done:
            self._end_string()
        return at

    def _end_string(self) -> None:
        self._string = None
        self._say('"')
        self._end_item()

    def _in_word(self, text: str, at: int) -> int:
        end = _WORD.match(text, at, at + MAX_WORD + 1 - len(self._word)).end()  # type: ignore[union-attr]
        self._word += text[at:end]
        if len(self._word) > MAX_WORD:
            self.broken = True
        elif end < len(text):
            self._end_word()
        return end

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        said = scalar_json(word)
        if said is None:
            self.broken = True
            return
        self._lead()
        self._say(f'"{said}"' if self._expect == "key" else said)
        self._end_item()

    def _end_item(self) -> None:
        if self._expect == "key":
            self._expect = "colon"
        else:
            self._end()
