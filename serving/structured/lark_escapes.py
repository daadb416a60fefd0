r"""Grammars in Lark's notation for unquoted texts that end with a mark.

A terminal ends where it cannot continue. A terminal that can match the mark could continue for ever: ``/[^;]+/`` also
matches ``\n</parameter>``. Therefore the text's last terminal may include the mark, and otherwise no terminal may
contain one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NoReturn

from ..interface.errors import InvalidField
from .expression import in_slashes, literal
from .lark_reading import LarkGrammar, read, specials
from .lark_strings import WHOLE, LarkWriter
from .regular import Chars, Choice, Node, Quoted, Repeated, Terminal, TooLarge
from .regular import Sequence as Items

_ENDED = 3  # the state after the mark


def ended_lark(text: str, end: str, marks: Sequence[str]) -> str | None:
    """Return the grammar of the texts of the grammar ``text``, each followed by ``end``.

    ``text`` has been checked. ``marks`` are the texts that no terminal may contain. None if ``text`` followed by
    ``end`` is the same, or if the grammar cannot be rewritten.
    """

    def refuse(what: str, line: int, allowed: str = "") -> NoReturn:
        raise InvalidField("", what, allowed)

    try:
        grammar = read(text, refuse)
        return None if grammar.unwritable else _Writer(grammar, refuse, end, marks).ended()
    except (InvalidField, TooLarge, RecursionError):
        return None


_RUST_ALONE = re.compile(r"[pPuUx]\{|\\[pPuUx]|\[\[|.\[|&&|--|~~|\[:")  # syntax that Python reads differently


class _Plain(Quoted):
    """The expressions of nodes without escaping for quotes."""

    def _make_whole(self, node: Node) -> str:
        if not isinstance(node, Chars):
            return super()._make_whole(node)
        return f"\\x{{{ord(min(node.special)):X}}}" if node.is_special else node.expression


def _may_hold(node: Node, char: str) -> bool:
    """Return whether the node's texts may contain ``char``; True if that is hard to determine."""
    if isinstance(node, Chars):
        if node.is_special or _RUST_ALONE.search(node.expression):
            return not node.is_special
        return re.fullmatch(node.expression, char) is not None
    if isinstance(node, Repeated):
        return _may_hold(node.node, char)
    assert isinstance(node, Items | Choice)
    return any(_may_hold(each, char) for each in (node.items if isinstance(node, Items) else node.options))


class _Writer(LarkWriter):
    states = (WHOLE, _ENDED)

    def __init__(self, grammar: LarkGrammar, refuse: object, end: str, marks: Sequence[str]) -> None:
        super().__init__(grammar, refuse)  # type: ignore[arg-type]
        self._quoted = _Plain()
        self._end = end
        self._without = f" & ~/(?s:.*)(?:{'|'.join(in_slashes(literal(mark)) for mark in marks)})(?s:.*)/"

    def ended(self) -> str | None:
        begin, start = self._beginning()
        firsts = [(start, begin, end) for end in dict.fromkeys((_ENDED, WHOLE, begin))]
        names = self._named(firsts)
        begins = self._end.lstrip()[0]
        if not any(isinstance(node, Terminal) and _may_hold(node.node, begins) for node, _, _ in names):
            return None  # no text can contain a mark
        mark = json.dumps(self._end)
        return self._text(
            [names[each] + ("" if each is firsts[0] else f" {mark}") for each in firsts if each in names], names
        )

    def expression(self, node: Terminal, begin: int, end: int) -> str | None:
        """See ``LarkWriter``."""
        body = self._quoted.nonempty(node.node)
        if begin == _ENDED or body is None or (end == _ENDED and not self._may_hold_end(node)):
            return None
        if node.lazy:
            return f"lazy/{in_slashes(body)}/"
        written = f"/{in_slashes(body)}/{self._without}"
        return written if end == WHOLE else f"({written}) /{in_slashes(literal(self._end))}/"

    def _may_hold_end(self, node: Terminal) -> bool:
        """Return whether the terminal could continue where the mark begins."""
        if node is self._ignored or node.lazy:
            return False
        return ("\n" in specials(node.node) or self._end[0] != "\n") and _may_hold(node.node, self._end.lstrip()[0])
