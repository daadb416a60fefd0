"""A filter of a text that may arrive piece by piece: what its rules match is masked, or ends the text.

Only the part that may belong to a match is held back. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from typing import Any

from ..interface.guardrails import MASK, TextRules
from .text_detectors import PII, Detector, Keywords

_CONTEXT = 2  # characters before a position that decide whether a match begins there


class _Stage:
    """A detector over a growing text. ``blocks`` says that a match ends the text, and is not masked."""

    __slots__ = ("_at", "_detector", "_text", "blocks", "is_blocked")

    def __init__(self, detector: Detector, *, blocks: bool) -> None:
        self._detector = detector
        self._text = ""  # what was not passed on, after some context
        self._at = 0  # where that begins
        self.blocks = blocks
        self.is_blocked = False

    @property
    def name(self) -> str:
        return self._detector.name

    def push(self, text: str, *, final: bool) -> str:
        """Return what is certain once ``text`` is added; all of it if this is its end."""
        self._text += text
        passed: list[str] = []
        while True:
            found = self._detector.find(self._text, self._at)
            begun = None if final else self._detector.begun(self._text, self._at)
            if found is None or (begun is not None and begun <= found[0]):
                self._pass(passed, len(self._text) if begun is None else begun)
                break
            self._pass(passed, found[0])
            if self.blocks:
                self.is_blocked = True
                break
            passed.append(MASK)
            self._at = found[1]
        dropped = max(0, self._at - _CONTEXT)
        self._text, self._at = self._text[dropped:], self._at - dropped
        return "".join(passed)

    def _pass(self, passed: list[str], end: int) -> None:
        passed.append(self._text[self._at : end])
        self._at = end


class TextFilter:
    """A filter of one text by ``rules``. ``blocked`` names the rule that has ended the text."""

    __slots__ = ("_stages", "blocked")

    def __init__(self, rules: TextRules) -> None:
        self._stages: list[_Stage] = []
        if rules.invalid_keywords:
            self._stages.append(_Stage(Keywords(rules.invalid_keywords), blocks=True))
        if rules.pii.behavior != "NONE":
            blocks = rules.pii.behavior == "BLOCK"
            self._stages += [_Stage(PII[name], blocks=blocks) for name in PII if name in rules.pii.types]
        self.blocked: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Return the text that is certain once ``text`` is added; with ``final`` it is the end of the text."""
        if self.blocked is not None:
            return ""
        for stage in self._stages:
            text = stage.push(text, final=final)
            if stage.is_blocked:
                self.blocked, final = stage.name, True
        return text


def filtered(text: str, rules: TextRules) -> tuple[str, str | None]:
    """Return a whole text as ``rules`` leave it, and the name of the rule that blocks it, or None."""
    found = TextFilter(rules)
    return found.push(text, final=True), found.blocked


def filtered_json(value: Any, rules: TextRules) -> tuple[Any, str | None]:
    """Return a JSON value whose texts, names and numbers are filtered, and the rule that blocks it, or None.

    A number that is masked becomes a text.
    """
    if isinstance(value, str):
        return filtered(value, rules)
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for name, entry in value.items():
            (name, blocked), (entry, also) = filtered(name, rules), filtered_json(entry, rules)
            if blocked or also:
                return value, blocked or also
            found[name] = entry
        return found, None
    if isinstance(value, list):
        entries = [filtered_json(entry, rules) for entry in value]
        return [entry for entry, _ in entries], next((blocked for _, blocked in entries if blocked), None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text, blocked = filtered(written := str(value), rules)
        return (value if text == written else text), blocked
    return value, None
