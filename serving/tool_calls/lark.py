"""Builds a grammar in llguidance's Lark notation, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..interface.constraint import Grammar
from ..structured.expression import in_slashes, literal

ANY_TEXT = "/(?s:.*)/"


class Lark:
    """A grammar under construction; most methods return an expression that refers to it.

    ``special`` has the ids of the tokenizer's special tokens by their texts; no ordinary text can imitate these tokens.
    Rules are named in the order in which they are made; equal rules get the same name.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._pieces = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None
        self._names: dict[str, str] = {}
        self._others: list[dict[str, Any]] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name; "" for an empty rule."""
        if not body.strip():
            return ""
        written = f"{options}: {body}"
        return self._names.setdefault(written, f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """Add a terminal with ``body`` as its expression and return its name."""
        return self._names.setdefault(f": {body}", f"T{len(self._names)}")

    def text(self, text: str) -> str:
        """Return an expression for exactly ``text``, with special tokens in it as tokens; "" for an empty text."""
        return " ".join(self._piece(piece) for piece in self._split(text))

    @staticmethod
    def plain(text: str) -> str:
        """Return an expression for exactly ``text`` of a caller, in which special tokens are ordinary characters."""
        return json.dumps(text, ensure_ascii=False)

    def until(self, mark: str, where: str = "") -> str:
        """Return an expression for any text up to and including the first ``mark``.

        White space at the beginning of the mark belongs to the text. ``where`` is a further condition on the text, such
        as " & ~/x/".
        """
        core = mark.lstrip()
        first, *rest = self._split(core)
        after = self.text("".join(rest))
        if first in self._special:
            return f"{self.terminal(ANY_TEXT + where)} {self._piece(first)} {after}"
        seen = first.rstrip()
        head = self.rule(self.terminal(f"/(?s:.*){quoted(seen)}/{where}"), "[lazy]")
        return f"{head} {self.text(first[len(seen) :])} {after}"

    def free(self, marks: Iterable[str], where: str = "") -> str:
        """Return an expression for any text, also the empty one, that contains none of ``marks``."""
        cores = [first.strip() for mark in marks if (first := next(iter(self._split(mark.strip())), ""))]
        seen = "|".join(quoted(core) for core in cores if core and core not in self._special)
        without = f" & ~/(?s:.*)(?:{seen})(?s:.*)/" if seen else ""
        return self.terminal(ANY_TEXT + without + where)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a JSON value of ``schema``, which is in the form that ``structured`` writes."""
        return self.rule("%json " + json.dumps(schema, ensure_ascii=False))

    def other(self, grammar: Grammar) -> str:
        """Add a whole grammar as a part of this one and return an expression for it."""
        [source] = json.loads(grammar.source)["grammars"]
        if source not in (known := [{k: v for k, v in one.items() if k != "name"} for one in self._others]):
            self._others.append({"name": f"g{len(self._others)}", **source})
            return f"@g{len(self._others) - 1}"
        return f"@g{known.index(source)}"

    def source(self, start: str) -> str:
        """Return the whole grammar, serialised; ``start`` is the expression of its start rule."""
        rules = "".join(f"{name}{body}\n" for body, name in self._names.items())
        grammars = [{"lark_grammar": f"start: {start}\n{rules}"}, *self._others]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))

    def _split(self, text: str) -> list[str]:
        pieces = self._pieces.split(text) if self._pieces is not None else [text]
        return [piece for piece in pieces if piece]

    def _piece(self, piece: str) -> str:
        token_id = self._special.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def quoted(text: str) -> str:
    """Return a regular expression for exactly ``text``, escaped for use between slashes."""
    return in_slashes(literal(text))


def one_of(options: Iterable[str]) -> str:
    """Return an expression for any of ``options``; duplicates are dropped."""
    given = list(dict.fromkeys(options))
    return given[0] if len(given) == 1 else "(" + " | ".join(given) + ")"


def times(item: str, minimum: int, maximum: int) -> str:
    """Return an expression for ``minimum`` to ``maximum`` repeats of ``item``; "" if ``maximum`` is 0 or less."""
    if maximum <= 0:
        return ""
    return f"({item})" if (minimum, maximum) == (1, 1) else f"({item}){{{minimum},{maximum}}}"
