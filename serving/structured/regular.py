"""Regular languages as trees, and the expressions of their texts between the quotes of a JSON string.

Between quotes a character is written as itself or as an escape: a backslash and a suffix (``n`` for a line break). Each
character has only one spelling, so the escaped texts of a regular language are regular too. ``suffixed`` gives the
texts that begin with an escape whose backslash has already been read (``quoted_lark`` explains why).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

SPECIAL = frozenset(map(chr, range(32))) | {'"', "\\"}  # written as escapes
MAX_EXPRESSION = 65_536
MAX_CHARS = 2 << 20  # of all expressions together, including parts of others

_SUFFIXES = {char: json.dumps(char)[2:-1] for char in SPECIAL}
_UNESCAPED = r'[^"\\\x00-\x1F]'


class TooLarge(Exception):
    """An expression or grammar exceeds ``MAX_EXPRESSION``, ``MAX_CHARS`` or the bounds of a grammar."""


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character: ``expression`` in Rust's syntax with its flags, and the ``SPECIAL`` characters that it matches."""

    expression: str
    special: frozenset[str]

    @property
    def is_special(self) -> bool:
        return self.expression == ""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    node: Node
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Unwritable:
    """A part of a grammar that cannot be written between quotes: ``what`` at ``line``."""

    what: str
    line: int
    special: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    name: str
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Terminal:
    """A use of a terminal in a rule. If ``lazy``, it ends as soon as it can."""

    node: Node
    lazy: bool = False


Node: TypeAlias = Chars | Sequence | Choice | Repeated | Unwritable | Rule | Terminal
_First: TypeAlias = Callable[[Node], str | None]
_OfChars: TypeAlias = Callable[[Chars], str | None]


def char(text: str) -> Chars:
    """Return a node for exactly one character."""
    return Chars("", frozenset(text)) if text in SPECIAL else Chars(escaped(text), frozenset())


def literal(text: str, flags: str = "") -> Sequence:
    if not flags:
        return Sequence(tuple(map(char, text)))
    return Sequence(
        tuple(each if (each := char(c)).is_special else Chars(f"(?i:{each.expression})", frozenset()) for c in text)
    )


def escaped(text: str) -> str:
    """Return a character in Rust's syntax, for use inside or outside a class."""
    if text.isalnum() or text in " _<>%@!,;:'\"=":
        return text
    return f"\\x{{{ord(text):X}}}"


class Quoted:
    """The expressions of nodes between quotes; None if a node has no such text.

    They are cached by node, because terminals are used many times.
    """

    def __init__(self) -> None:
        self._whole: dict[Node, str] = {}
        self._suffixed: dict[Node, str | None] = {}
        self._plain: dict[Node, str | None] = {}
        self._nullable: dict[Node, bool] = {}
        self._num_chars = 0

    def _checked(self, expression: str) -> str:
        self._num_chars += len(expression)
        if len(expression) > MAX_EXPRESSION or self._num_chars > MAX_CHARS:
            raise TooLarge
        return expression

    def is_nullable(self, node: Node) -> bool:
        if node not in self._nullable:
            self._nullable[node] = self._make_nullable(node)
        return self._nullable[node]

    def _make_nullable(self, node: Node) -> bool:
        if isinstance(node, Sequence):
            return all(map(self.is_nullable, node.items))
        if isinstance(node, Choice):
            return any(map(self.is_nullable, node.options))
        return isinstance(node, Repeated) and (node.minimum == 0 or self.is_nullable(node.node))

    def whole(self, node: Node) -> str:
        """Return the expression of all texts."""
        if node not in self._whole:
            self._whole[node] = self._checked(self._make_whole(node))
        return self._whole[node]

    def _make_whole(self, node: Node) -> str:
        if isinstance(node, Chars):
            options = [] if node.is_special else [_without_special(node)]
            if node.special:
                options.append(r"\\" + _suffix(node.special))
            return _any(options)
        if isinstance(node, Sequence):
            return "".join(map(self.whole, node.items))
        if isinstance(node, Choice):
            return _any(map(self.whole, node.options))
        if isinstance(node, Repeated):
            return f"(?:{self.whole(node.node)}){_times(node.minimum, node.maximum)}"
        raise AssertionError(node)  # has been refused

    def suffixed(self, node: Node) -> str | None:
        """Return the expression of the texts that begin with an escape, without its backslash."""
        if node not in self._suffixed:
            self._suffixed[node] = self._first(node, self.suffixed, lambda it: _suffix(it.special) or None)
        return self._suffixed[node]

    def nonempty(self, node: Node) -> str | None:
        """Return the expression of all texts except the empty one."""
        if not self.is_nullable(node):
            return self.whole(node)
        if node not in self._plain:
            self._plain[node] = self._first(node, self.nonempty, self.whole)
        return self._plain[node]

    def _first(self, node: Node, first: _First, of_chars: _OfChars) -> str | None:
        """Return the expression of the texts whose first character ``of_chars`` accepts; ``first`` recurses."""
        if isinstance(node, Chars):
            return of_chars(node)
        options: list[str | None] = []
        if isinstance(node, Choice):
            options = [first(option) for option in node.options]
        elif isinstance(node, Sequence):
            for i, item in enumerate(node.items):
                begin = first(item)
                options.append(None if begin is None else begin + "".join(map(self.whole, node.items[i + 1 :])))
                self._checked("".join(filter(None, options)))
                if not self.is_nullable(item):
                    break
        elif isinstance(node, Repeated):
            begin = None if node.maximum == 0 else first(node.node)
            maximum = None if node.maximum is None else node.maximum - 1
            rest = f"(?:{self.whole(node.node)}){_times(max(node.minimum - 1, 0), maximum)}" if maximum != 0 else ""
            options = [None if begin is None else begin + rest]
        else:
            raise AssertionError(node)  # has been refused
        found = [option for option in options if option is not None]
        return self._checked(_any(found)) if found else None


def _any(options: Iterable[str]) -> str:
    found = list(dict.fromkeys(options))
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _times(minimum: int, maximum: int | None) -> str:
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _without_special(node: Chars) -> str:
    if not node.special:
        return node.expression
    flags, _, inner = node.expression.partition(":") if node.expression.startswith("(?i:") else ("", "", "")
    if flags:
        return f"(?i:[{inner[:-1]}&&{_UNESCAPED}])"
    return f"[{node.expression}&&{_UNESCAPED}]"


def _suffix(special: Iterable[str]) -> str:
    suffixes = sorted(_SUFFIXES[each] for each in special)
    short = "".join(each for each in suffixes if len(each) == 1)
    options = [f"[{short}]".replace("\\", "\\\\")] if short else []
    for begin in ("u000", "u001"):
        if ends := "".join(each[-1] for each in suffixes if each.startswith(begin)):
            options.append(f"{begin}[{ends}]")
    return _any(options) if options else ""
