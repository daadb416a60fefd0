"""Parses regular expressions in Rust's syntax (``regex-syntax``), as llguidance reads them in Lark, into trees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from .regular import SPECIAL, Chars, Choice, Node, Repeated, Sequence, char

MAX_GROUPS_DEEP = 50

_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_REPEAT = re.compile(r"\{([0-9]{1,6})(,)?([0-9]{1,6})?\}")
_FLAGS = re.compile(r"\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_PROPERTY = re.compile(r"([pP])(?:\{(\^?)([A-Za-z_ ]{1,40})\}|([A-Z]))")
_POSIX = re.compile(r"\[:(\^?)([a-z]+):\]")
_BEGIN = re.compile(r"((?:\(\?[isu]+\))?)(?:\^|\\A)")
_END = re.compile(r"(?<!\\)(?:\\\\)*(\$|\\z)\Z")
_MULTILINE = re.compile(r"\(\?[a-z]*m")
_CONTROL = SPECIAL - {'"', "\\"}
_SPACE = frozenset("\t\n\v\f\r")
_NONE: frozenset[str] = frozenset()
_GENERAL_CATEGORIES = "l lu ll lt lm lo lc m mn mc me n nd nl no s sc sk sm so z zs zl zp pc pd pe pf pi ps"
_LETTERS = """
letter uppercaseletter lowercaseletter mark number decimalnumber symbol separator alphabetic uppercase lowercase latin
greek cyrillic han hiragana katakana arabic hebrew hangul thai devanagari"""
_PROPERTIES = {  # the special characters that have each property
    **dict.fromkeys((_GENERAL_CATEGORIES + _LETTERS).split(), _NONE),
    **dict.fromkeys(("cc", "control", "c", "other"), _CONTROL),
    **dict.fromkeys(("p", "punctuation", "po"), frozenset('"\\')),
    **dict.fromkeys(("any", "ascii"), SPECIAL),
    "whitespace": _SPACE,
}
_POSIX_CLASSES = {
    **dict.fromkeys(("alnum", "alpha", "digit", "lower", "upper", "word", "xdigit"), _NONE),
    "ascii": SPECIAL, "blank": frozenset("\t"), "cntrl": _CONTROL, "graph": frozenset('"\\'),
    "print": frozenset('"\\'), "punct": frozenset('"\\'), "space": _SPACE,
}  # fmt: skip


def tree(text: str, flags: str, refuse: Callable[[str], NoReturn]) -> Node:
    """Return the tree of an expression. ``refuse(allowed)`` raises; it is called for syntax that may mean something
    else here."""
    return _Reader(text, refuse).read(flags)


class _Reader:
    def __init__(self, text: str, refuse: Callable[[str], NoReturn]) -> None:
        self.text, self.at, self.refuse = text, 0, refuse

    def read(self, flags: str) -> Node:
        """Parse the expression. Anchors at both ends are dropped: a terminal always matches as a whole."""
        begin, end = _BEGIN.match(self.text), _END.search(self.text)
        if end:
            self.text = self.text[: end.start(1)]
        if begin:
            self.text = begin[1] + self.text[begin.end() :]
        node = self._choice(self._changed("", flags, ""), 0)
        if self.at < len(self.text):
            self.refuse("an expression with an opening parenthesis for each closing one")
        if (begin or end) and (isinstance(node, Choice) or "m" in flags or _MULTILINE.search(self.text)):
            self.refuse("^ and $ without the flag m, at the ends of all alternatives together: ^(?:a|b)$")
        return node

    def _changed(self, flags: str, on: str, off: str) -> str:
        if set(on + off) - set("ismu") or "u" in off:
            self.refuse("expressions with no flags but i, s, m and u")
        return "".join(sorted((set(flags) | set(on)) - set(off)))

    def _choice(self, flags: str, depth: int) -> Node:
        if depth > MAX_GROUPS_DEEP:
            self.refuse(f"at most {MAX_GROUPS_DEEP} groups within each other")
        options: list[list[Node]] = [[]]
        while self.at < len(self.text) and self.text[self.at] != ")":
            found = self._take(_FLAGS, 1) if self.text[self.at] == "(" else None
            if found:
                inner = self._changed(flags, found[1], found[2] or "")
                if found[3] == ")":
                    flags = inner  # they apply up to the end of this group
                else:
                    options[-1].append(self._group(inner, depth))
            elif self.text[self.at] == "|":
                self.at += 1
                options.append([])
            elif self.text[self.at] in "*+?{":
                self._repeat(options[-1])
            else:
                options[-1].append(self._atom(flags, depth))
        made = [Sequence(tuple(items)) for items in options]
        return made[0] if len(made) == 1 else Choice(tuple(made))

    def _take(self, expression: re.Pattern[str], skip: int = 0) -> re.Match[str] | None:
        found = expression.match(self.text, self.at + skip)
        if found:
            self.at = found.end()
        return found

    def _next(self) -> str:
        if self.at >= len(self.text):
            self.refuse("an expression that does not end in the middle of an escape, a class or a group")
        self.at += 1
        return self.text[self.at - 1]

    def _group(self, flags: str, depth: int) -> Node:
        node = self._choice(flags, depth + 1)
        if self._next() != ")":
            self.refuse("a closing parenthesis for each opening one")
        return node

    def _repeat(self, items: list[Node]) -> None:
        if not items:
            self.refuse("something to repeat before a quantifier")
        minimum, maximum = 0, None
        if self.text[self.at] == "{":
            found = self._take(_REPEAT)
            if found is None or (found[3] and not found[2]):
                self.refuse("quantifiers {n}, {n,} and {n,m}")
            minimum = int(found[1])
            maximum = int(found[3]) if found[3] else None if found[2] else minimum
        else:
            sign = self._next()
            minimum, maximum = (1 if sign == "+" else 0), (1 if sign == "?" else None)
        if maximum is not None and minimum > maximum:
            self.refuse("quantifiers from fewer to more")
        if self.text[self.at : self.at + 1] == "?":
            self.at += 1  # a lazy quantifier matches the same texts
        items[-1] = Repeated(items[-1], minimum, maximum)

    def _atom(self, flags: str, depth: int) -> Node:
        sign = self._next()
        if sign == "(":
            if self.text[self.at : self.at + 1] == "?" and not self._take(_NAME):
                self.refuse("no look-around and no groups but (…), (?:…) and (?P<name>…)")
            return self._group(flags, depth)
        if sign == ".":
            return _dot("s" in flags)
        if sign in "^$":
            self.refuse(f"expressions with {sign} at their ends alone")
        if sign == "[":
            begin = self.at - 1
            special = self._class(0)
            return _with(self.text[begin : self.at], special, flags)
        if sign == "\\":
            begin = self.at - 1
            special, is_set = self._escape()
            if not is_set and special:
                return char(next(iter(special)))
            return _with(self.text[begin : self.at], special, flags)
        return char(sign) if sign in SPECIAL else _with(_one(sign), _NONE, flags)

    def _escape(self) -> tuple[frozenset[str], bool]:
        """Parse an escape; return the special characters that it matches, and whether it is a set of characters."""
        if found := self._take(_CODE):
            code = int(next(filter(None, found.groups())), 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self.refuse("escapes of characters")
            return frozenset(chr(code)) & SPECIAL, False
        if found := self._take(_PROPERTY):
            name = (found[3] or found[4]).lower().replace("_", "").replace(" ", "")
            if name not in _PROPERTIES:
                self.refuse(f"no property \\{found[0]}: general categories and common scripts")
            inverted = (found[1] == "P") != bool(found[2])
            return (SPECIAL - _PROPERTIES[name] if inverted else _PROPERTIES[name]), True
        sign = self._next()
        if sign in "dw":
            return _NONE, True
        if sign in "DW":
            return SPECIAL, True
        if sign in "sS":
            return (_SPACE if sign == "s" else SPECIAL - _SPACE), True
        if sign in _CONTROLS:
            return frozenset(_CONTROLS[sign]), False
        if sign.isalnum() or not sign.isascii() or sign in "<>":
            self.refuse(f"no escape \\{sign}")
        return frozenset(sign) & SPECIAL, False

    def _class(self, depth: int) -> frozenset[str]:
        """Parse a class after its opening bracket, including its end; return the special characters it matches."""
        if depth > MAX_GROUPS_DEEP:
            self.refuse(f"at most {MAX_GROUPS_DEEP} classes within each other")
        negated = self.text[self.at : self.at + 1] == "^"
        self.at += negated
        result: frozenset[str] | None = None
        operator, union, first = "", _NONE, True
        while True:
            pair = self.text[self.at : self.at + 2]
            if pair in ("&&", "--", "~~"):
                result, operator, union = _combined(result, operator, union), pair, _NONE
                self.at += 2
            elif pair[:1] == "]" and not first:
                self.at += 1
                result = _combined(result, operator, union)
                return SPECIAL - result if negated else result
            else:
                union |= self._class_item(depth)
            first = False

    def _class_item(self, depth: int) -> frozenset[str]:
        if found := self._take(_POSIX):
            if found[2] not in _POSIX_CLASSES:
                self.refuse(f"no class {found[0]}")
            return SPECIAL - _POSIX_CLASSES[found[2]] if found[1] else _POSIX_CLASSES[found[2]]
        if self.text[self.at : self.at + 1] == "[":
            self.at += 1
            return self._class(depth + 1)
        special, low = self._class_char()
        rest = self.text[self.at : self.at + 2]
        if rest[:1] != "-" or rest in ("-]", "--", "-"):
            return special
        self.at += 1
        _, high = self._class_char()
        if low < 0 or high < low:
            self.refuse("ranges in a class from a lower to a higher character")
        return frozenset(each for each in SPECIAL if low <= ord(each) <= high)

    def _class_char(self) -> tuple[frozenset[str], int]:
        """Parse one character of a class; return the special characters it matches, and its code (-1 for a set)."""
        sign = self._next()
        if sign != "\\":
            return frozenset(sign) & SPECIAL, ord(sign)
        begin = self.at
        special, is_set = self._escape()
        if is_set:
            return special, -1
        written = self.text[begin : self.at]
        if found := _CODE.fullmatch(written):
            return special, int(next(filter(None, found.groups())), 16)
        return special, ord(_CONTROLS.get(written, written))


def _combined(left: frozenset[str] | None, operator: str, right: frozenset[str]) -> frozenset[str]:
    if left is None:
        return right
    return left & right if operator == "&&" else left - right if operator == "--" else left ^ right


def _one(sign: str) -> str:
    return sign if sign.isalnum() or sign in " _" else f"\\x{{{ord(sign):X}}}"


def _dot(all_of_them: bool) -> Chars:
    return Chars(r"[\x{0}-\x{10FFFF}]", SPECIAL) if all_of_them else Chars(r"[^\n]", SPECIAL - {"\n"})


def _with(expression: str, special: frozenset[str], flags: str) -> Chars:
    return Chars(f"(?i:{expression})" if "i" in flags else expression, special)
