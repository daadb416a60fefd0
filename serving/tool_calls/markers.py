"""The literals of a format as markers that can be searched for in a growing text.

A parser gets each special token as one surrogate character, which no decoded text contains. Ordinary text that spells
a special token's name is therefore not taken for the token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..interface.tool_format import ToolFormat

FIRST_SURROGATE = 0xD800
SPACE = " \t\r\n"
MAX_SPACE = 64  # characters of white space within a marker
MAX_GAP = 256  # characters of white space between the parts of a possible call
NO, PARTIAL = -1, -2
_SPACES = re.compile(f"[{SPACE}]*")
_SURROGATES = re.compile("[\ud800-\udfff]")


def stand_ins(special_tokens: Iterable[str], format: ToolFormat, known: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the stand-in character, by the token's text, of each special token that a parser looks for.

    These are the tokens that are ``known`` or that occur in a literal of ``format``.
    """
    texts = (*format.literals, *known)
    found = sorted(token for token in set(special_tokens) if token and any(token in each for each in texts))
    return {token: chr(FIRST_SURROGATE + i) for i, token in enumerate(found)}


class Marker:
    """A literal in which white space matches any amount of white space, at most ``MAX_SPACE`` characters.

    ``first`` is its first character. An empty literal matches everywhere.
    """

    __slots__ = ("_pieces", "first")

    def __init__(self, literal: str) -> None:
        self._pieces = literal.split()
        self.first = self._pieces[0][0] if self._pieces else ""

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def match(self, text: str, at: int) -> int:
        """Return where the marker that begins at ``at`` ends.

        Return NO if there is none, PARTIAL if ``text`` ends within a possible marker.
        """
        for i, piece in enumerate(self._pieces):
            if i:
                at = skip_space(text, begun := at)
                if at - begun > MAX_SPACE:
                    return NO
            if text.startswith(piece, at):
                at += len(piece)
            elif len(text) - at < len(piece) and piece.startswith(text[at:]):
                return PARTIAL
            else:
                return NO
        return at


def skip_space(text: str, at: int) -> int:
    """Return the position of the first character from ``at`` on that is not white space."""
    return _SPACES.match(text, at).end()  # type: ignore[union-attr]


def past_gap(text: str, at: int) -> int:
    """Do the same as ``skip_space``, but return PARTIAL if the text ends there and NO if there is too much space."""
    end = skip_space(text, at)
    if end - at > MAX_GAP:
        return NO
    return PARTIAL if end == len(text) else end


class Search:
    """A search for the first of several markers."""

    __slots__ = ("_first", "_markers")

    def __init__(self, markers: Mapping[str, Marker]) -> None:
        self._markers = [(kind, marker) for kind, marker in markers.items() if marker]
        chars = "".join(dict.fromkeys(re.escape(marker.first) for _, marker in self._markers))
        self._first = re.compile(f"[{chars}]") if chars else None

    def find(self, text: str, at: int) -> tuple[int, str, int]:
        """Return ``(start, kind, end)`` of the first marker from ``at`` on.

        Without a marker ``kind`` is "" and ``start`` is the end of the text. If ``text`` may end within a marker,
        ``kind`` is "", ``end`` is PARTIAL and ``start`` is the marker's possible beginning.
        """
        while self._first is not None and (found := self._first.search(text, at)):
            at = found.start()
            partial = False
            for kind, marker in self._markers:
                end = marker.match(text, at)
                if end >= 0:
                    return at, kind, end
                partial = partial or end == PARTIAL
            if partial:
                return at, "", PARTIAL
            at += 1
        return len(text), "", NO


class Literals:
    """A format's literals as markers, in which stand-in characters replace special tokens."""

    def __init__(self, format: ToolFormat, specials: Mapping[str, str]) -> None:
        self._names = {char: token for token, char in specials.items()}
        self._specials = sorted(specials.items(), key=lambda item: -len(item[0]))
        self.format = format
        self.begins = tuple(self._marker(literal) for literal in format.begin if literal)
        self.end = self._marker(format.end)
        self.separator = self._marker(format.separator)
        self.call_begin = self._marker(format.call_begin)
        self.name_end = self._marker(format.name_end)
        self.id_begin = self._marker(format.id_begin)
        self.call_end = self._marker(format.call_end)
        self.parameter_begin = self._marker(format.parameter_begin)
        self.key_end = self._marker(format.key_end)
        self.key_end_json = self._marker(format.key_end_json)
        self.value_end = self._marker(format.value_end)
        reasoning = format.reasoning
        self.reasoning_begin = self._marker(reasoning.begin if reasoning else "")
        self.reasoning_end = self._marker(reasoning.end if reasoning else "")

    def _marker(self, literal: str) -> Marker:
        return Marker(self.encode(literal))

    def encode(self, text: str) -> str:
        """Return ``text`` with the names of special tokens replaced by their stand-in characters."""
        for token, char in self._specials:
            text = text.replace(token, char)
        return text

    def is_special(self, marker: Marker) -> bool:
        """Return whether ``marker`` begins with a special token, which ordinary text cannot imitate."""
        return marker.first in self._names

    def named(self, text: str) -> str:
        """Return ``text`` with stand-in characters replaced by the names of their special tokens."""
        return _SURROGATES.sub(lambda found: self._names.get(found[0], ""), text) if self._names else text

    def without(self, text: str) -> str:
        """Return ``text`` without the stand-in characters of special tokens."""
        return _SURROGATES.sub("", text) if self._names else text


@lru_cache(maxsize=64)
def literals(format: ToolFormat, specials: tuple[tuple[str, str], ...]) -> Literals:
    """Return the literals of a format for one tokenizer; ``specials`` are the sorted items of ``stand_ins``."""
    return Literals(format, dict(specials))
