"""Callers' regular expressions, parsed and rewritten in the syntax of llguidance (Rust's ``regex-syntax`` without
look-around), which matches a text as a whole.

Syntax with the same meaning in JavaScript, Python and Rust is accepted. Where the meanings differ, the narrower one is
written: ``\\d`` and ``\\w`` are ASCII, a dot matches no line break. A lazy quantifier becomes a plain one: it changes
what a search captures, but not which texts match. Syntax that is not regular (look-around, backreferences …) is refused
with its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from ..interface.errors import InvalidField
from .document import is_unicode

MAX_CHARS = 16_384
MAX_GROUPS_DEEP = 50
MAX_REPEAT = 10_000

ANY_TEXT = "(?s:.*)"
_DOT, _DOT_ALL = r"[^\n\r\u{2028}\u{2029}]", r"(?s:.)"
_SPACE = r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_SETS = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACE}]",
    "S": rf"[^{_SPACE}\x1C-\x1F\x85\u{{FEFF}}]",
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_REPEAT = re.compile(r"\{0*([0-9]+)(,0*([0-9]*))?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})")
_PROPERTY = re.compile(r"[pP](?:\{\^?[A-Za-z0-9_=]{1,64}\}|[A-Z])")
_FLAGS = re.compile(r"\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_NAME = re.compile(r"\?P?<([A-Za-z_][A-Za-z0-9_]*)>")

# The patterns with look-ahead that pydantic 2.12 and 2.13 write for a Decimal: the common prefix, then the rest for any
# Decimal or one with a maximum of decimal places, and for one with a maximum of digits.
_DECIMAL = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(.*)")
_DECIMAL_PLACES = re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(\d{1,3})\}0\*)\$")
_DECIMAL_DIGITS = re.compile(
    r"\(\?:\\d\{0,(\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(\d{1,3})\}0\*\$\)\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(\d{1,3})\})0\*\$?\)\$?"
)


@dataclass(slots=True)
class _Sequence:
    items: list[_Node] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    options: list[_Sequence]
    flags: str = ""  # "i", "s", "-i" …

    @property
    def opening(self) -> str:
        return f"(?{self.flags}:"


@dataclass(slots=True)
class _Repeated:
    node: _Node
    times: str


_Node: TypeAlias = "str | _Choice | _Repeated"  # "^" and "$" are anchors; the characters themselves are escaped


def lark_expression(text: object, name: str) -> str:
    """Return the expression for Lark's ``/…/``, which matches whole texts. ``name`` is the request field."""
    return in_slashes(_translated(text, _refusal(name, text), ""))


def whole_text_pattern(text: object, refuse: Callable[[str], NoReturn]) -> str:
    """Return an expression for the whole text from a schema's ``pattern``, which may match anywhere in the text.

    ``refuse(allowed)`` raises.
    """
    return f"^(?:{_translated(text, refuse, ANY_TEXT)})$"


def literal(text: str) -> str:
    """Return an expression that matches only this text."""
    return "".join(map(_literal, text))


def in_slashes(expression: str) -> str:
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), expression)


def _translated(text: object, refuse: Callable[[str], NoReturn], around: str) -> str:
    if not isinstance(text, str) or len(text) > MAX_CHARS or not is_unicode(text):
        refuse(f"a regular expression of at most {MAX_CHARS:,} characters")
    assert isinstance(text, str)
    decimal = _decimal(text)
    if decimal is not None:
        return decimal
    return _Writer(refuse, around).choice(_Reader(text, refuse).read(), around, around)


def _refusal(name: str, value: object) -> Callable[[str], NoReturn]:
    def refuse(allowed: str) -> NoReturn:
        raise InvalidField(name, value, allowed)

    return refuse


def _decimal(text: str) -> str | None:
    """Return pydantic's expression of a Decimal without look-ahead and with bounds; None for any other expression."""
    outer = _DECIMAL.fullmatch(text)
    if outer is None:
        return None
    if places := _DECIMAL_PLACES.fullmatch(outer[1]):
        return _digits(18, int(places[1] or 18))
    if digits := _DECIMAL_DIGITS.fullmatch(outer[1]):
        whole, maximum = int(digits[1]), int(digits[2]) - 1
        if digits[3]:
            return _digits(whole, int(digits[3]))
        return "|".join(_digits(before, maximum - before) for before in range(min(maximum, 40) + 1))
    return None


def _digits(whole: int, places: int) -> str:
    """Return an optional sign, then digits before and after a point, at least one in total."""
    options = []
    if whole:
        options.append(rf"[0-9]{{1,{whole}}}" + (rf"(?:\.[0-9]{{0,{places}}})?" if places else ""))
    if places:
        options.append(rf"0?\.[0-9]{{1,{places}}}")
    return f"[+-]?(?:{'|'.join(options or ['0'])})"


class _Reader:
    """A parser of an expression into a tree."""

    def __init__(self, text: str, refuse: Callable[[str], NoReturn]) -> None:
        self.text, self.at, self.refuse = text, 0, refuse

    def read(self) -> _Choice:
        choice = self._choice(0)
        if self.at < len(self.text):
            self.refuse(f"an opening parenthesis for the closing one at {self.at}")
        return choice

    def _choice(self, depth: int, flags: str = "", dot: str = _DOT) -> _Choice:
        if depth > MAX_GROUPS_DEEP:
            self.refuse(f"at most {MAX_GROUPS_DEEP} groups within each other")
        choice = _Choice([_Sequence()], flags)
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self._next()
            items = choice.options[-1].items
            if char == "|":
                choice.options.append(_Sequence())
            elif char in "*+?{":
                self._repeat(items, char)
            elif char == "(":
                items.append(self._group(depth, dot, first=len(choice.options) == 1 and not items))
            elif char == "[":
                items.append(self._class())
            elif char in "^$":
                items.append(char)
            elif char == ".":
                items.append(dot)
            elif char == "\\":
                items.append(self._escape())
            else:
                items.append(_literal(char))
        return choice

    def _next(self) -> str:
        if self.at >= len(self.text):
            self.refuse("an expression that does not end in the middle of an escape, a class or a group")
        self.at += 1
        return self.text[self.at - 1]

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def _repeat(self, items: list[_Node], char: str) -> None:
        times = char
        if char == "{":
            self.at -= 1
            found = self._take(_REPEAT)
            if found is None:
                self._literal_brace(items)
                return
            times = self._repetitions(found[1], found[2] is not None, found[3] or "")
        if not items or items[-1] in ("^", "$") or isinstance(items[-1], _Repeated):
            self.refuse(f"something to repeat before {times!r}")
        items[-1] = _Repeated(items[-1], times)
        if self.text[self.at : self.at + 1] == "?":
            self.at += 1  # a lazy quantifier matches the same texts
        elif self.text[self.at : self.at + 1] == "+":
            self.refuse("no possessive quantifier (a++)")

    def _repetitions(self, minimum: str, to: bool, maximum: str) -> str:
        numbers = [int(digits) if len(digits) < 9 else 10**9 for digits in (minimum, maximum) if digits]
        if max(numbers) > MAX_REPEAT or sorted(numbers) != numbers:
            self.refuse(f"repetitions from fewer to more, at most {MAX_REPEAT:,}")
        return "{" + ",".join(map(str, numbers)) + ("," if to and not maximum else "") + "}"

    def _literal_brace(self, items: list[_Node]) -> None:
        self.at += 1
        if self.text[self.at : self.at + 1] == ",":
            self.refuse("{0,n} in place of {,n}")
        items.append(r"\{")

    def _group(self, depth: int, dot: str, *, first: bool) -> _Choice:
        flags, rest = "", False
        if self.text[self.at : self.at + 1] == "?" and not self._take(_NAME):
            found = self._take(_FLAGS)
            if not found:
                self._refuse_group()
            on, off, rest = found[1], found[2] or "", found[3] == ")"
            if set(on + off) - set("isu") or (rest and not first):
                self.refuse("no flags but i, s and u, and flags at the beginning alone")
            dot = _DOT_ALL if "s" in on else _DOT if "s" in off else dot
            flags = ("i" if "i" in on else "") + ("-i" if "i" in off else "")
        choice = self._choice(depth + 1, flags, dot)
        if not rest and self._next() != ")":
            self.refuse("a closing parenthesis for each opening one")
        return choice

    def _refuse_group(self) -> NoReturn:
        rest = self.text[self.at :]
        for begin, what in (
            ("?=", "look-ahead (?=…)"),
            ("?!", "look-ahead (?!…)"),
            ("?<=", "look-behind (?<=…)"),
            ("?<!", "look-behind (?<!…)"),
            ("?P=", "backreference (?P=…)"),
            ("?>", "atomic group (?>…)"),
            ("?#", "comment (?#…)"),
            ("?(", "conditional (?(…)…)"),
        ):
            if rest.startswith(begin):
                self.refuse(f"an expression without {what}")
        self.refuse(f"no group that begins with ({rest[:2]}")

    def _escape(self) -> _Node:
        char = self._next()
        if char in "123456789":
            self.refuse(f"an expression without backreferences (\\{char})")
        if char in "bB":
            self.refuse(f"an expression without word boundaries (\\{char})")
        if char == "A":
            return "^"
        if char in "zZ":
            return "$"
        self.at -= 1
        return self._escaped_set() or _literal(self._escaped_char())

    def _escaped_set(self) -> str:
        """Return a set (``\\d``, ``\\W``, ``\\p{L}`` …) in a form valid in a class and alone; "" if there is none."""
        char = self.text[self.at : self.at + 1]
        if char in _SETS:
            self.at += 1
            return _SETS[char]
        found = self._take(_PROPERTY)
        return f"\\{found[0]}" if found else ""

    def _escaped_char(self) -> str:
        found = self._take(_HEX)
        if found:
            return self._code_point(found)
        char = self._next()
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "c" and self.text[self.at : self.at + 1].isascii() and self.text[self.at : self.at + 1].isalpha():
            return chr(ord(self._next()) % 32)
        if char == "k":
            self.refuse("an expression without backreferences (\\k)")
        if char.isascii() and char.isalnum():
            self.refuse(f"no escape \\{char}")
        return char

    def _code_point(self, found: re.Match[str]) -> str:
        code = int(next(filter(None, found.groups())), 16)
        if 0xD800 <= code < 0xDC00 and self.text[self.at : self.at + 1] == "\\":
            start, self.at = self.at, self.at + 1
            low = self._take(_HEX)
            second = int(next(filter(None, low.groups())), 16) if low else 0
            if 0xDC00 <= second < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + second - 0xDC00)
            self.at = start
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self.refuse("escapes of characters, no halves of surrogate pairs")
        return chr(code)

    def _class(self) -> str:
        negated = self.text[self.at : self.at + 1] == "^"
        self.at += negated
        if self.text[self.at : self.at + 1] == "]":
            self.refuse("classes that are not empty; in one, \\] is a bracket")
        parts = []
        while self.text[self.at : self.at + 1] != "]":
            parts.append(self._class_part())
        self.at += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_part(self) -> str:
        if self.text.startswith("[:", self.at):
            self.refuse("no POSIX classes ([:alpha:])")
        first = self._class_char()
        if (
            len(first) > 1
            or self.text[self.at : self.at + 1] != "-"
            or self.text[self.at + 1 : self.at + 2] in ("]", "")
        ):
            return first if len(first) > 1 else _in_class(first)
        self.at += 1
        last = self._class_char()
        if len(last) > 1 or last < first:
            self.refuse("ranges in a class from a lower to a higher character")
        return f"{_in_class(first)}-{_in_class(last)}"

    def _class_char(self) -> str:
        """Return one character of a class unescaped, or a set in its written form."""
        char = self._next()
        if char != "\\":
            return char
        if self.text[self.at : self.at + 1] == "b":
            self.at += 1
            return "\b"
        return self._escaped_set() or self._escaped_char()


class _Writer:
    """A writer of a tree as an expression. ``around`` is what may precede and follow a match without anchors."""

    def __init__(self, refuse: Callable[[str], NoReturn], around: str) -> None:
        self.refuse, self.around = refuse, around

    def choice(self, choice: _Choice, left: str | None, right: str | None) -> str:
        """Return the expression of a choice.

        ``left`` and ``right`` are put where the text may extend beyond the match; None if an anchor is not allowed
        there.
        """
        written = "|".join(self._sequence(option.items, left, right) for option in choice.options)
        return f"{choice.opening}{written})"

    def _sequence(self, items: list[_Node], left: str | None, right: str | None) -> str:
        items = list(items)
        while items and items[0] == "^" and left is not None:
            items.pop(0)
            left = left and ""
        while items and items[-1] == "$" and right is not None:
            items.pop()
            right = right and ""
        if not items:
            return (left or "") + (right or "")
        written = [self._node(node, left if index == 0 else None, right if index == len(items) - 1 else None)
                   for index, node in enumerate(items)]  # fmt: skip
        return "".join(written)

    def _node(self, node: _Node, left: str | None, right: str | None) -> str:
        if node in ("^", "$"):
            self.refuse("^ and $ at the ends of the expression alone")
        if isinstance(node, _Choice) and _has_anchors(node):
            return self.choice(node, left, right)
        if isinstance(node, _Choice):
            inner = self.choice(node, None, None)
        elif isinstance(node, _Repeated):
            inner = self._node(node.node, None, None) + node.times
        else:
            inner = node
        return (left or "") + inner + (right or "")


def _has_anchors(choice: _Choice) -> bool:
    return any(
        item in ("^", "$") or (isinstance(item, _Choice) and _has_anchors(item))
        for option in choice.options
        for item in option.items
    )


def _literal(char: str) -> str:
    return f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~" else _visible(char)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in r"\[]^-&~#" else _visible(char)


def _visible(char: str) -> str:
    return char if char.isprintable() else f"\\x{{{ord(char):X}}}"
