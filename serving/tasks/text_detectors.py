"""Detectors of keywords and personal data in a text that may still be growing.

A detector finds matches, and knows from which position on the end of a text may begin a match, or a longer one, if more
text follows. What lies before that position is certain, so that a stream can pass it on. All expressions are bounded
and without nested repetition of the same characters, so that each takes time linear in the length of the text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

from ..interface.guardrails import PiiType

Span: TypeAlias = tuple[int, int]
MAX_MATCH = 700  # characters; no match, and no beginning of one, is longer
_WORD = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")


class Detector(Protocol):
    """A finder of one kind of text."""

    @property
    def name(self) -> str:
        """The name of the kind, for messages."""
        ...

    def find(self, text: str, start: int) -> Span | None:
        """Return the first match that begins at ``start`` or later; of several that begin there, the longest."""
        ...

    def begun(self, text: str, start: int) -> int | None:
        """Return the first position from ``start`` on at which more text could make a match, or a longer one."""
        ...


class Keywords:
    """A detector of words, in any case. A keyword that begins or ends with an ASCII letter or digit is only found
    where no further one adjoins."""

    name = "invalid_keywords"

    def __init__(self, keywords: Iterable[str]) -> None:
        self._keywords = sorted({_lower(keyword) for keyword in keywords}, key=len, reverse=True)
        self._by_first: dict[str, list[str]] = {}
        for keyword in self._keywords:
            self._by_first.setdefault(keyword[0], []).append(keyword)

    def find(self, text: str, start: int) -> Span | None:
        lower = _lower(text)
        best: Span | None = None
        for keyword in self._keywords:  # the longest first
            at = _find_word(lower, keyword, start)
            if at is not None and (best is None or at < best[0]):
                best = (at, at + len(keyword))
        return best

    def begun(self, text: str, start: int) -> int | None:
        lower = _lower(text)
        for place in range(max(start, len(lower) - len(self._keywords[0])), len(lower)):
            tail = lower[place:]
            for keyword in self._by_first.get(lower[place], ()):
                if keyword.startswith(tail) and _begins_word(lower, keyword, place):
                    return place
        return None


def _lower(text: str) -> str:
    """Return ``text`` in lower case, character by character: the result is as long as the text."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(small if len(small := char.lower()) == 1 else char for char in text)


def _find_word(text: str, keyword: str, start: int) -> int | None:
    at = text.find(keyword, start)
    while at >= 0:
        end = at + len(keyword)
        ends = keyword[-1] not in _WORD or end >= len(text) or text[end] not in _WORD
        if ends and _begins_word(text, keyword, at):
            return at
        at = text.find(keyword, at + 1)
    return None


def _begins_word(text: str, keyword: str, at: int) -> bool:
    return keyword[0] not in _WORD or at == 0 or text[at - 1] not in _WORD


class Pattern:
    """A detector by expressions: ``forms`` match whole (a longer one first), and ``partial`` everything that may become
    such a match. ``valid`` checks what a form has matched."""

    def __init__(self, name: PiiType, forms: Iterable[str], partial: str, valid: Callable[[str], bool] = bool) -> None:
        self.name: str = name
        self._forms = [re.compile(form) for form in forms]
        self._partial = re.compile(rf"(?:{partial})\Z")
        self._valid = valid

    def find(self, text: str, start: int) -> Span | None:
        best: Span | None = None
        for form in self._forms:
            found = next(self._matches(form, text, start, len(text) if best is None else best[0]), None)
            if found is not None and (best is None or found < best[0]):
                matched = form.match(text, found)
                assert matched is not None
                best = matched.span()
        return best

    def _matches(self, form: re.Pattern[str], text: str, start: int, before: int) -> Iterator[int]:
        while start < before and (found := form.search(text, start)) is not None:
            if self._valid(found[0]):
                yield found.start()
            start = found.start() + 1

    def begun(self, text: str, start: int) -> int | None:
        found = self._partial.search(text, max(start, len(text) - MAX_MATCH))
        return None if found is None or not found[0] else found.start()


def _luhn(text: str) -> bool:
    digits = [int(char) for char in reversed(text) if char.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    whole = text.replace(" ", "")
    return int("".join(str(int(char, 36)) for char in whole[4:] + whole[:4])) % 97 == 1


def _is_address(text: str) -> bool:
    if not any(char not in ":." for char in text):
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_LOCAL, _LABEL = "[A-Za-z0-9._%+-]", "[A-Za-z0-9-]"
_APART = "(?<![0-9A-Za-z])"
_FIRST_SSN = "(?<![0-9-])"
_FIRST_V4, _FIRST_V6 = "(?<![0-9.])", "(?<![0-9A-Za-z:.])"
_HEX = "[0-9A-Fa-f]{0,4}"
_FIRST_PHONE = "(?<![0-9A-Za-z+.-])"
_BETWEEN = "[ .()/-]{0,2}"
PII: dict[PiiType, Pattern] = {
    "email": Pattern(
        "email",
        [rf"(?<!{_LOCAL}){_LOCAL}{{1,64}}@(?:{_LABEL}{{1,63}}\.){{1,8}}[A-Za-z]{{2,24}}"],
        rf"(?<!{_LOCAL}){_LOCAL}{{1,64}}(?:@(?:{_LABEL}{{1,63}}\.){{0,8}}{_LABEL}{{0,63}})?",
    ),
    "iban": Pattern(
        "iban",
        [rf"{_APART}[A-Z]{{2}}[0-9]{{2}}(?: ?[0-9A-Z]){{{n}}}(?![0-9A-Za-z])" for n in range(30, 10, -1)],
        rf"{_APART}[A-Z]{{1,2}}|{_APART}[A-Z]{{2}}[0-9]|{_APART}[A-Z]{{2}}[0-9]{{2}}(?: ?[0-9A-Z]){{0,30}} ?",
        _is_iban,
    ),
    "credit_card": Pattern(
        "credit_card",
        [rf"(?<![0-9])[2-6](?:[ -]?[0-9]){{{n - 1}}}(?![0-9])" for n in range(19, 12, -1)],
        r"(?<![0-9])[2-6](?:[ -]?[0-9]){0,18}[ -]?",
        _luhn,
    ),
    "us_ssn": Pattern(
        "us_ssn",
        [
            rf"{_FIRST_SSN}(?!000|666|9)[0-9]{{3}}{apart}(?!00)[0-9]{{2}}{apart}(?!0000)[0-9]{{4}}(?![0-9-])"
            for apart in ("-", " ")
        ],
        rf"{_FIRST_SSN}[0-9]{{1,3}}(?:[- ](?:[0-9]{{1,2}}(?:[- ][0-9]{{0,4}})?)?)?",
    ),
    "ip_address": Pattern(
        "ip_address",
        [
            rf"{_FIRST_V6}(?:{_HEX}:){{2,7}}{_HEX}(?![0-9A-Za-z:])",
            rf"{_FIRST_V4}(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}(?![0-9])(?!\.[0-9])",
        ],
        rf"{_FIRST_V6}(?:{_HEX}:){{0,7}}{_HEX}|{_FIRST_V4}[0-9]{{1,3}}(?:\.[0-9]{{0,3}}){{0,3}}\.?",
        _is_address,
    ),
    "phone": Pattern(
        "phone",
        [
            rf"{_FIRST_PHONE}\+[0-9](?:{_BETWEEN}[0-9]){{6,14}}(?![0-9])",
            rf"{_FIRST_PHONE}(?:\([2-9][0-9]{{2}}\)|[2-9][0-9]{{2}})[ .-]?[0-9]{{3}}[ .-][0-9]{{4}}(?![0-9])",
        ],
        rf"{_FIRST_PHONE}\+(?:[0-9](?:{_BETWEEN}[0-9]){{0,14}}{_BETWEEN})?"
        rf"|{_FIRST_PHONE}(?:\([0-9]{{0,3}}\)?|[0-9]{{1,3}})[ .-]?[0-9]{{0,3}}[ .-]?[0-9]{{0,4}}",
    ),
}
