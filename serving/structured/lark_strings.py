r"""Rewrites grammars in Lark's notation for texts between the quotes of a JSON string.

It is not enough to escape the terminals one by one. llguidance ends a terminal at the first byte that cannot continue
it. Between quotes, the line break after ``/[^\n]*/`` begins with a backslash, which could continue the terminal
(``\"``, ``\\``), and the ``n`` after it comes too late. Therefore a backslash belongs to the terminal before it, and
the one byte after the backslash decides what follows, as it does without quotes. Each terminal has several forms: it
begins with a whole character or after a backslash, and it ends with a character or with the backslash of the next one.
Each rule has the same forms, by the states that it connects::

    START ──a──► WHOLE ──"b"──► WHOLE        a "\n" b   is   a\ n b      (a with its backslash, n, b)
             └─a\──► BACKSLASH ──n──► WHOLE

Ignored terminals are written out, before each terminal except the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NoReturn

from ..interface.errors import InvalidField
from .expression import in_slashes
from .lark_reading import LarkGrammar, read
from .regular import Choice, Node, Quoted, Repeated, Rule, Sequence, Terminal, TooLarge

_ALLOWED = "rules and terminals that can be written within quotes, as the calls of this model have a text"
MAX_RULES = 3000
MAX_CHARS = 512 * 1024
START, WHOLE, BACKSLASH = 0, 1, 2

_Symbol = tuple[Node, int, int]
_Option = list["_Symbol | str"]  # a sequence of symbols and expressions


def quoted_lark(text: str, field: str) -> str:
    """Return the grammar of the escaped texts of the grammar ``text``, without the quotes.

    ``text`` has been checked. Raises ``InvalidField``, with the line, for what cannot be written between quotes.
    """

    def refuse(what: str, line: int, allowed: str = "") -> NoReturn:
        raise InvalidField(field, what, f"{allowed or _ALLOWED} (line {line})")

    try:
        grammar = read(text, refuse)
        if not grammar.special:
            return text  # nothing to escape
        for found in grammar.unwritable[:1]:
            refuse(found.what, found.line)
        return LarkWriter(grammar, refuse).written()
    except (TooLarge, RecursionError):  # the latter if terminals refer to each other more than a hundred levels deep
        raise InvalidField(field, "the grammar", "a smaller one: within quotes it has too many forms") from None


class LarkWriter:
    """A writer of a grammar whose rules connect states. ``states`` are all states except ``START``."""

    states: tuple[int, ...] = (WHOLE, BACKSLASH)

    def __init__(self, grammar: LarkGrammar, refuse: Callable[..., NoReturn]) -> None:
        self._grammar, self._refuse = grammar, refuse
        self._quoted = Quoted()
        self._known: dict[object, Node] = {}  # nodes derived from others; each is made once
        ignored = Terminal(Choice(tuple(grammar.ignored))) if grammar.ignored else None
        self._ignored = ignored
        once = grammar.options.get("ignore_once")
        self._skipped = Repeated(ignored, 0, 1 if once else None) if ignored else None
        self._options: dict[_Symbol, list[_Option]] = {}

    def written(self) -> str:
        begin, start = self._beginning()
        firsts = [(start, begin, end) for end in dict.fromkeys((WHOLE, begin))]
        names = self._named(firsts)
        return self._text([names[first] for first in firsts if first in names], names)

    def _beginning(self) -> tuple[int, Node]:
        if "start" not in self._grammar.rules:
            self._refuse("a grammar without the rule 'start'", 1)
        return WHOLE if self._grammar.options.get("allow_initial_skip") else START, self._grammar.rules["start"]

    def _named(self, firsts: list[_Symbol]) -> dict[_Symbol, str]:
        """Return the names of all symbols that occur in some text."""
        self._follow(firsts)
        names = self._reachable(firsts, self._productive())
        if not names:
            self._refuse("a grammar with no text at all", 1)
        return names

    def _follow(self, firsts: list[_Symbol]) -> None:
        waiting = list(firsts)
        while waiting:
            symbol = waiting.pop()
            if symbol in self._options:
                continue
            if len(self._options) > 8 * MAX_RULES:
                raise TooLarge
            self._options[symbol] = options = list(self._of(*symbol))
            waiting += [each for option in options for each in option if not isinstance(each, str)]

    def _of(self, node: Node, begin: int, end: int) -> Iterator[_Option]:
        if isinstance(node, Terminal):
            yield from self._terminal(node, begin, end)
        elif isinstance(node, Rule):
            if node.name not in self._grammar.rules:
                self._refuse(f"the rule {node.name!r}, which is not there", node.line)
            yield [(self._grammar.rules[node.name], begin, end)]
        elif isinstance(node, Choice):
            for each in node.options:
                yield [(each, begin, end)]
        elif isinstance(node, Sequence):
            yield from self._sequence(node, begin, end)
        elif isinstance(node, Repeated):
            yield from self._repeated(node, begin, end)
        else:
            raise AssertionError(node)

    def _between(self, first: Node, then: Node, begin: int, end: int) -> Iterator[_Option]:
        for state in (START, *self.states) if begin == START else self.states:
            yield [(first, begin, state), (then, state, end)]

    def _sequence(self, node: Sequence, begin: int, end: int) -> Iterator[_Option]:
        if not node.items:
            yield from [[]] if begin == end else []
        elif len(node.items) == 1:
            yield [(node.items[0], begin, end)]
        else:
            half = len(node.items) // 2
            first = self._made(("first", node), lambda: Sequence(node.items[:half]))
            rest = self._made(("rest", node), lambda: Sequence(node.items[half:]))
            yield from self._between(first, rest, begin, end)

    def _repeated(self, node: Repeated, begin: int, end: int) -> Iterator[_Option]:
        inner, minimum, maximum = node.node, node.minimum, node.maximum
        if (minimum, maximum) == (0, None):
            yield from [[]] if begin == end else []
            yield from self._between(node, inner, begin, end)
        elif (minimum, maximum) == (1, 1):
            yield [(inner, begin, end)]
        elif maximum == 0:
            yield from [[]] if begin == end else []
        elif (minimum, maximum) == (0, 1):
            yield from [[]] if begin == end else []
            yield [(inner, begin, end)]
        elif minimum == maximum:
            half = self._times(inner, minimum // 2, minimum // 2)
            pair = [half, half, inner] if minimum % 2 else [half, half]
            yield [(self._made(("pair", inner, minimum), lambda: Sequence(tuple(pair))), begin, end)]
        elif minimum:
            more = self._times(inner, 0, None if maximum is None else maximum - minimum)
            yield from self._between(self._times(inner, minimum, minimum), more, begin, end)
        else:  # either fewer than half, or half and up to as many again, so that each number has one derivation
            assert maximum is not None
            many = (maximum + 1) // 2
            yield [(self._times(inner, 0, many - 1), begin, end)]
            yield from self._between(self._times(inner, many, many), self._times(inner, 0, maximum - many), begin, end)

    def _times(self, node: Node, minimum: int, maximum: int | None) -> Node:
        return self._made(("times", node, minimum, maximum), lambda: Repeated(node, minimum, maximum))

    def _made(self, key: object, make: Callable[[], Node]) -> Node:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _terminal(self, node: Terminal, begin: int, end: int) -> Iterator[_Option]:
        nullable = self._quoted.is_nullable(node.node)
        if nullable and begin == end:
            yield []
        if end == START or (node.lazy and (nullable or end != WHOLE)):
            return  # a lazy terminal ends with its last character, whatever follows
        skips = self._skipped is not None and node is not self._ignored and begin != START
        for state in self.states if skips else (begin,):
            found = self.expression(node, state, end)
            if found is not None and skips:
                assert self._skipped is not None
                yield [(self._skipped, begin, state), found]
            elif found is not None:
                yield [found]

    def expression(self, node: Terminal, begin: int, end: int) -> str | None:
        """Return the expression of a terminal between two states; None if it does not connect them."""
        quoted = self._quoted
        body = quoted.suffixed(node.node) if begin == BACKSLASH else quoted.nonempty(node.node)
        ending = r"\\" if end == BACKSLASH else ""
        return None if body is None else f"{'lazy' if node.lazy else ''}/{in_slashes(body)}{ending}/"

    def _productive(self) -> set[_Symbol]:
        """Return the symbols that derive some text."""
        users: dict[_Symbol, list[tuple[_Symbol, int]]] = {}
        missing: list[int] = []
        found: list[_Symbol] = []
        known: set[_Symbol] = set()
        for symbol, options in self._options.items():
            for option in options:
                needed = {each for each in option if not isinstance(each, str)}
                missing.append(len(needed))
                for each in needed:
                    users.setdefault(each, []).append((symbol, len(missing) - 1))
                if not needed:
                    found.append(symbol)
        while found:
            symbol = found.pop()
            if symbol in known:
                continue
            known.add(symbol)
            for user, place in users.get(symbol, ()):
                missing[place] -= 1
                if missing[place] == 0:
                    found.append(user)
        return known

    def _reachable(self, firsts: list[_Symbol], productive: set[_Symbol]) -> dict[_Symbol, str]:
        """Return the names, in the written grammar, of the productive symbols that can be reached from ``firsts``.

        Options that are not productive are dropped.
        """
        names: dict[_Symbol, str] = {}
        waiting = [first for first in firsts if first in productive]
        while waiting:
            symbol = waiting.pop()
            if symbol in names:
                continue
            names[symbol] = f"r{len(names)}"
            self._options[symbol] = [
                option
                for option in self._options[symbol]
                if all(isinstance(each, str) or each in productive for each in option)
            ]
            waiting += [each for option in self._options[symbol] for each in option if not isinstance(each, str)]
        return names

    def _text(self, begins: list[str], names: dict[_Symbol, str]) -> str:
        terminals: dict[str, str] = {}
        lines = ["start: " + " | ".join(begins)]
        if options := {key: self._grammar.options[key] for key in ("no_forcing",) if key in self._grammar.options}:
            lines.append("%llguidance " + json.dumps(options))
        for symbol, name in names.items():
            options_written = []
            for option in self._options[symbol]:
                words = [
                    terminals.setdefault(each, f"{'l' if each.startswith('lazy') else 'T'}{len(terminals)}")
                    if isinstance(each, str)
                    else names[each]
                    for each in option
                ]
                options_written.append(" ".join(words) or '""')
            lines.append(f"{name}: " + " | ".join(dict.fromkeys(options_written)))
        for body, name in terminals.items():
            lazy = body.startswith("lazy")
            lines.append(f"{name}[lazy]: {body[4:]}" if lazy else f"{name}: {body}")
        if len(lines) > MAX_RULES or sum(map(len, lines)) > MAX_CHARS:
            raise TooLarge
        return "\n".join(lines)
